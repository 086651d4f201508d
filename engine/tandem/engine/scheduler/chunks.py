"""How many tokens of a prompt one step takes. Pure.

A prompt that is handed over wants chunks: what is computed travels meanwhile, and what is left to
travel at the end is the last one. Prompts that wait for it want them, too. One that is alone does
not: each chunk more costs it a launch and a part of the device's speed.
"""

from __future__ import annotations

from tandem.engine.config.scheduler import SchedulerConfig


class Chunks:
    """Counts of one scheduler's steps."""

    def __init__(self, config: SchedulerConfig) -> None:
        whole = config.max_num_batched_tokens
        self._usual = config.long_prefill_token_threshold or whole
        self._alone = config.lone_prefill_token_threshold or self._usual
        self.most_begun = config.max_num_begun_tokens or whole
        """Prompt tokens of requests that begin in one step."""

    def count(self, remaining: int, most: int, *, alone: bool) -> int:
        """Return the tokens of the next chunk of a prompt with ``remaining`` tokens to compute, at
        most ``most``. ``alone``: no other prompt waits or is in the
        step."""
        return min(remaining, most, self._alone if alone else self._usual)


def cost_behind(start: int, count: int, steepness: float) -> float:
    """What ``count`` tokens behind ``start`` take, in tokens of a prompt's start: each looks back
    at all before it, which costs ``steepness`` of a token for each."""
    return count * (1 + steepness * (start + count / 2))
