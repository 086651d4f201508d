"""Into how many chunks a prompt is cut for the link that its KV goes by. Pure.

The model. Chunks c1 … ck are computed one after the other, T(c, start) seconds each, by measured
steps. KV of a chunk is there to be sent at its end, goes behind that of the chunk before, and takes
X(c) = chunk_s + c * token_s on the link, as measured. So the last byte is at D at the end of

    computed(i) = computed(i - 1) + T(ci),    sent(i) = max(computed(i), sent(i - 1)) + X(ci).

Of one chunk that is T + X; of k equal ones about T + X / k where the link is the faster of both,
and T / k + X where it is the slower, with what steps of fewer tokens cost on top. A cached prefix
takes no part: where P has it, D mostly has it, too.

Only cuts that are finer than the usual one are weighed. What counts is the sum of both ends, that
of the steps, when token 1 is there, and that of the link, when token 2 can be begun: so a cut never
costs the device more than it brings forward, and the next chunk is not taken for a trifle. What it
brings forward must be more than noise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from tandem.engine.scheduler.chunks import Chunks, cost_behind
from tandem.engine.scheduler.padding import Padding
from tandem.engine.scheduler.step_times import MeasuredSteps
from tandem.protocol.kv import LinkTimes
from tandem.protocol.steps import seconds_at

StepSeconds = Callable[[int, int], float]
"""Seconds of a step of (tokens before, tokens)."""

LEAST_TOKENS = 64
"""Of a chunk."""
LEAST_SHARE = 4
"""A chunk is as small as the smallest step that was measured by so much, at most: what is smaller
still may cost more than its share of that step. Once tried, it is measured itself."""
MOST_CHUNKS = 16
"""That a prompt is cut into for its link's sake."""
LEAST_STEPS = 3
"""Of a size, to go by what they took."""
LEAST_GAIN = 0.05
"""Of the seconds that the usual chunks are computed in: what a finer cut must bring forward. Times
of steps are medians, a few hundredths off."""
NEAR = 0.02
"""Of the same: cuts whose sums differ by less are alike, and the one of fewer chunks is taken."""


class Foretold(NamedTuple):
    """What comes of a cut."""

    busy_s: float
    """Seconds of its steps together."""
    end_s: float
    """From the first step's begin until the last KV has come."""


def foretell(
    sizes: Sequence[int],
    start: int,
    link: LinkTimes,
    step_seconds: StepSeconds,
    least_busy_s: float = 0.0,
) -> Foretold:
    """Of chunks of ``sizes`` tokens behind ``start``. Steps that seem to take less than
    ``least_busy_s`` all together are stretched to it: what the link does not bring is no gain."""
    times = []
    for size in sizes:
        times.append(step_seconds(start, size))
        start += size
    busy = sum(times)
    stretch = max(1.0, least_busy_s / busy) if busy > 0 else 1.0
    computed = sent = 0.0
    for size, seconds in zip(sizes, times, strict=True):
        computed += stretch * seconds
        sent = max(computed, sent) + link.chunk_s + size * link.token_s
    return Foretold(computed, sent)


def equal_chunks(count: int, chunk: int) -> list[int]:
    """``count`` tokens in chunks of ``chunk``, the last of what is left."""
    whole, rest = divmod(count, chunk)
    return [chunk] * whole + [rest] * (rest > 0)


def finer_chunk(
    usual: Sequence[int],
    start: int,
    link: LinkTimes,
    step_seconds: StepSeconds,
    *,
    block_size: int,
    least: int,
) -> int | None:
    """Tokens of a chunk, in whole blocks and ``least`` at least, by which KV comes so much sooner
    than by the ``usual`` chunks that it is worth the steps; None if none is."""
    count = sum(usual)
    before = foretell(usual, start, link, step_seconds)
    found: list[tuple[float, int]] = []
    for chunks in range(2, MOST_CHUNKS + 1):
        chunk = -(-count // (chunks * block_size)) * block_size
        if chunk < least:
            break
        if chunk >= max(usual):
            continue
        cut = foretell(equal_chunks(count, chunk), start, link, step_seconds, before.busy_s)
        gain = before.end_s - cut.end_s
        if gain >= LEAST_GAIN * before.busy_s and gain >= cut.busy_s - before.busy_s:
            found.append((cut.end_s + cut.busy_s, chunk))
    if not found:
        return None
    near = min(found)[0] + NEAR * before.busy_s
    return max(chunk for cost, chunk in found if cost <= near)


class LinkCuts:
    """Weighs cuts by what one scheduler's steps take."""

    def __init__(
        self, chunks: Chunks, measured: MeasuredSteps, padding: Padding, block_size: int
    ) -> None:
        self._chunks, self._measured, self._padding = chunks, measured, padding
        self._block_size = block_size

    def chunk(self, start: int, remaining: int, most: int, link: LinkTimes | None) -> int | None:
        """Tokens of a chunk of a prompt that is alone, with ``start`` tokens computed and
        ``remaining`` to compute, ``most`` in a step; None is as usual, as it is while nothing is
        known of the link or of steps, or where the usual cut is as good."""
        points = () if link is None else self._measured.prompt_steps_of(LEAST_STEPS)
        if link is None or not points:
            return None
        usual = self._chunks.sizes(start, remaining, most)
        least = max(LEAST_TOKENS, self._block_size, points[0][0] // LEAST_SHARE)

        def step_seconds(start: int, count: int) -> float:
            seen = cost_behind(start, count, self._measured.steepness) - count
            return seconds_at(points, self._padding.weight(0, count, 1) + round(seen))

        return finer_chunk(
            usual, start, link, step_seconds, block_size=self._block_size, least=least
        )
