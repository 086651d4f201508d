"""How many tokens of a prompt one step takes. Pure.

A prompt that is handed over wants chunks: what is computed travels meanwhile, and what is left to
travel at the end is the last one. Prompts that wait for it want them, too. One that is alone does
not: each chunk more costs it a launch and a part of the device's speed.
"""

from __future__ import annotations

from tandem.engine.config.scheduler import SchedulerConfig


class Chunks:
    """Counts of one scheduler's steps."""

    def __init__(self, config: SchedulerConfig, block_size: int) -> None:
        whole = config.max_num_batched_tokens
        self._block_size = block_size
        self._usual = config.long_prefill_token_threshold or whole
        self._alone = config.lone_prefill_token_threshold or self._usual
        self._last = config.last_prefill_chunk_tokens
        self.most_begun = config.max_num_begun_tokens or whole
        """Prompt tokens of requests that begin in one step."""

    def count(
        self, start: int, remaining: int, most: int, *, alone: bool, finer: int | None = None
    ) -> int:
        """Of a prompt with ``start`` tokens computed and ``remaining`` to compute, ``most`` at
        most. ``alone``: nobody else's prompt waits or is in the step. ``finer``: for its link's
        sake at most so many, up to a block's end. A last chunk is no longer than it was asked to
        be: a few rows more are a tile more of each product."""
        count = min(remaining, most, self._alone if alone else self._usual)
        if finer is not None and finer < count:
            end = (start + finer) // self._block_size * self._block_size
            return end - start if end > start else finer
        if self._last is None or count < remaining or remaining < 2 * self._last:
            return count
        end = -(-(start + remaining - self._last) // self._block_size) * self._block_size
        return min(end - start, count)

    def sizes(self, start: int, remaining: int, most: int) -> list[int]:
        """All chunks of a prompt that stays alone, ``most`` tokens in a step."""
        sizes = []
        while remaining > 0:
            sizes.append(self.count(start, remaining, most, alone=True))
            start, remaining = start + sizes[-1], remaining - sizes[-1]
        return sizes


def cost_behind(start: int, count: int, steepness: float) -> float:
    """What ``count`` tokens behind ``start`` take, in tokens of a prompt's start: each looks back
    at all before it, which costs ``steepness`` of a token for each."""
    return count * (1 + steepness * (start + count / 2))
