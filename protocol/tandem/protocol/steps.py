"""Durations of an engine's steps as measured points."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Annotated, NamedTuple

from msgspec import Meta

TARGET_ITL_MS = 25.0
"""Default of a router's target between tokens."""
SHARE_OF_TARGET = 0.84
"""Share of the target that a step may take."""


def step_bound(target_itl_ms: float, given: Collection[str]) -> list[str]:
    """Return the flags that bound the steps of a worker, for a target in milliseconds.

    Empty if a setting in ``given``, by name, has a bound.
    """
    if "max_itl_ms" in given:
        return []
    return ["--max-itl-ms", f"{SHARE_OF_TARGET * target_itl_ms:g}"]


StepTimes = Annotated[tuple[tuple[int, float], ...], Meta(max_length=32)]
"""(size of a step, seconds), by size in decodes or prompt tokens; empty if unknown."""


class DecodeBatch(NamedTuple):
    """Decodes of one step."""

    streams: int
    context: int = 0
    """Tokens of context of all streams."""

    def joined(self, tokens: int) -> DecodeBatch:
        """Return a copy with another stream, of ``tokens`` of context."""
        return DecodeBatch(self.streams + 1, self.context + tokens)


def seconds_at(points: Sequence[tuple[int, float]], size: int) -> float:
    """Return the seconds of a step of ``size``, 0 if unknown.

    Interpolates between points, and scales the nearest one beyond them.
    """
    if not points or size <= 0:
        return 0.0
    before = points[0]
    if size <= before[0]:
        return before[1] * size / before[0]
    for after in points[1:]:
        if size <= after[0]:
            share = (size - before[0]) / (after[0] - before[0])
            return before[1] + share * (after[1] - before[1])
        before = after
    return before[1] * size / before[0]


def decode_seconds(points: Sequence[tuple[int, float]], decodes: int) -> float:
    """Return the seconds of a step of so many decodes.

    Weights are read once, so the first point is the minimum. Beyond the last point, extends the
    last segment.
    """
    if not points or decodes <= 0:
        return 0.0
    first, last = points[0], points[-1]
    if decodes <= first[0]:
        return first[1]
    if decodes <= last[0]:
        return seconds_at(points, decodes)
    if len(points) == 1:
        return last[1]
    before = points[-2]
    slope = max(0.0, (last[1] - before[1]) / (last[0] - before[0]))
    return last[1] + slope * (decodes - last[0])


def decode_batch_seconds(
    points: Sequence[tuple[int, float]], context_s: float, decode_batch: DecodeBatch
) -> float:
    """Return the seconds of a step of decodes, 0 if unknown.

    ``points`` exclude contexts; each token of a context takes ``context_s``.
    """
    own = decode_seconds(points, decode_batch.streams)
    return own + context_s * decode_batch.context if own else 0.0
