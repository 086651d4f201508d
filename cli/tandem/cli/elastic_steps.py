"""The bound of mixed steps that a stack's workers get where its router places elastically.

Elastic placement sends prompts to whoever has time for them, and counts on steps with decodes that
stay within the bound of gaps; without one such steps are over it, and few prompts leave the prefill
worker (docs/pair.md). Pure; called by ``up``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from tandem.router.config import TARGET_ITL_MS, RouterConfig

SHARE_OF_TARGET = 0.84
"""Of the router's target between tokens: what a step may take, so that what is around it fits."""
BOUNDS = frozenset({
    "max_itl_ms", "max_num_mixed_tokens", "mixed_tokens_per_decode", "least_mixed_tokens",
})  # fmt: skip
"""Settings of a worker any of which says how long, or how wide, its mixed steps may be."""


def bound_steps(
    router: RouterConfig,
    given: Mapping[str, Collection[str]],
    flags: Mapping[str, Sequence[str]],
) -> dict[str, Sequence[str]]:
    """``flags`` by role with ``--max-itl-ms`` for roles that have no bound of their own.

    ``given`` are the names of the engine's settings that workers of each role were given, by
    whatever way; where a role is missing there is no pair, and nothing is added.
    """
    if router.placement != "elastic" or not {"prefill", "decode"} <= given.keys():
        return dict(flags)
    target = TARGET_ITL_MS if router.target_itl_ms is None else router.target_itl_ms
    added = ["--max-itl-ms", f"{SHARE_OF_TARGET * target:g}"]
    roles = {role for role, names in given.items() if BOUNDS.isdisjoint(names)}
    return {**flags, **{role: [*flags.get(role, ()), *added] for role in roles}}
