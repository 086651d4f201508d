"""Bounds of mixed steps for workers whose router places elastically. Pure; called by ``up``."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from tandem.protocol.step_bound import step_bound
from tandem.router.config import RouterConfig


def bound_steps(
    router: RouterConfig,
    given: Mapping[str, Collection[str]],
    flags: Mapping[str, Sequence[str]],
) -> dict[str, Sequence[str]]:
    """Return ``flags`` by role, with ``--max-itl-ms`` for roles without a bound.

    ``given`` are the names of the engine settings of each role's workers, from any source. Without
    both roles there is no pair, and nothing is added.
    """
    if router.placement != "elastic" or not {"prefill", "decode"} <= given.keys():
        return dict(flags)
    added = {role: step_bound(router.target_itl_ms, names) for role, names in given.items()}
    return {
        **flags,
        **{role: [*flags.get(role, ()), *more] for role, more in added.items() if more},
    }
