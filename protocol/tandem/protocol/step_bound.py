"""The bound of steps with decodes that workers get where their router places elastically.

Elastic placement sends prompts to whoever has time for them, and counts on steps with decodes that
stay within the bound of gaps; without one such steps are over it, and few prompts leave the prefill
worker (docs/pair.md). Who starts workers beside such a router gives them ``--max-itl-ms``. Pure.
"""

from __future__ import annotations

from collections.abc import Collection

TARGET_ITL_MS = 25.0
"""A router's target between tokens, unless given."""
SHARE_OF_TARGET = 0.84
"""Of it: what a step may take, so that what is around it fits."""
BOUNDS = frozenset({"max_itl_ms", "max_num_mixed_tokens"})
"""Settings of a worker any of which says how long, or how wide, its mixed steps may be."""


def step_bound(target_itl_ms: float | None, given: Collection[str]) -> list[str]:
    """Flags that bound the steps of a worker beside a router with that target between tokens, in
    milliseconds (None is the default): none where the settings that it was ``given``, by name,
    have a bound."""
    if not BOUNDS.isdisjoint(given):
        return []
    target = TARGET_ITL_MS if target_itl_ms is None else target_itl_ms
    return ["--max-itl-ms", f"{SHARE_OF_TARGET * target:g}"]
