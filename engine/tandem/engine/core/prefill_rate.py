"""How many prompt tokens a second an engine computes, as placement wants to know it."""

from __future__ import annotations

from collections import deque

STEPS = 32
"""How many of the last steps count."""


class PrefillRate:
    """The rate at which half the prompt tokens of the last steps were computed, or faster.

    A median over tokens: a step of few tokens, which takes nearly as long as one of a thousand,
    says little about what a long prompt would take, and a step that had to build its kernels says
    nothing.
    """

    def __init__(self) -> None:
        self._steps: deque[tuple[float, int]] = deque(maxlen=STEPS)

    @property
    def tokens_per_s(self) -> float:
        """0 before the first step."""
        half = sum(tokens for _, tokens in self._steps) / 2
        for rate, tokens in sorted(self._steps, reverse=True):
            half -= tokens
            if half <= 0:
                return rate
        return 0.0

    def note(self, tokens: int, seconds: float) -> None:
        """One step of ``tokens`` prompt tokens took ``seconds``, above 0."""
        self._steps.append((tokens / seconds, tokens))
