"""Bound of mixed steps for GPU workers of a pair.

Placement sends prompts to any worker with time for them. It relies on steps with decodes that stay
within the target between tokens. The process that starts workers for such a router passes
``--max-itl-ms``, unless hand-off is strict (docs/tuning.md). Pure.
"""

from __future__ import annotations

from collections.abc import Collection

TARGET_ITL_MS = 25.0
"""Default target between tokens of a router."""
SHARE_OF_TARGET = 0.84
"""Share of the target that a step may take, so that the time around it fits."""
BOUNDS = frozenset({"max_itl_ms", "max_num_mixed_tokens"})
"""Settings of a worker that bound the time or the width of its mixed steps."""


def step_bound(target_itl_ms: float, given: Collection[str]) -> list[str]:
    """Return the flags that bound the steps of a worker whose router has that target between
    tokens, in milliseconds. Empty if a setting in ``given``, by name, has a bound."""
    if not BOUNDS.isdisjoint(given):
        return []
    return ["--max-itl-ms", f"{SHARE_OF_TARGET * target_itl_ms:g}"]
