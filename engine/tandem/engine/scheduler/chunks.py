"""Sizes of prompt chunks. Pure.

A prompt that is handed over is cut into chunks: computed ones are sent meanwhile, and only the last
is left to send at the end. It is cut as well if other prompts wait. A prompt that is alone is not:
each further chunk costs it a launch and a part of the device's speed.
"""

from __future__ import annotations

from tandem.engine.config.scheduler import SchedulerConfig


class Chunks:
    """Sizes of chunks in the steps of one scheduler."""

    def __init__(self, config: SchedulerConfig) -> None:
        whole = config.max_num_batched_tokens
        self._usual = config.long_prefill_token_threshold or whole
        self._alone = config.lone_prefill_token_threshold or self._usual
        self.most_begun = config.max_num_begun_tokens or whole
        """Prompt tokens of requests that begin in one step."""

    def count(self, remaining: int, most: int, *, alone: bool) -> int:
        """Return the tokens of the next chunk of a prompt with ``remaining`` tokens to compute, at
        most ``most``. ``alone``: no other prompt waits or is in the step."""
        return min(remaining, most, self._alone if alone else self._usual)


def cost_behind(start: int, count: int, steepness: float) -> float:
    """Return the cost of ``count`` tokens after ``start``, in tokens of a prompt's start. Each
    attends to all tokens before it, at ``steepness`` of a token for each."""
    return count * (1 + steepness * (start + count / 2))
