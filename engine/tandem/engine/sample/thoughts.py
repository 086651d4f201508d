"""The forced end of a thought at its token budget: its closing mark is the only token allowed then.

Only the thought that an answer begins with counts. If the prompt has begun it, its tokens count
from the answer's first on. Otherwise the model opens it; an answer that does not open one with its
first tokens has none.
"""

from __future__ import annotations

from collections.abc import Sequence

from tandem.engine.sample.allowed import AllowedTokens
from tandem.protocol.sampling import ThinkingMarks

AHEAD = 2
"""Steps that may be launched before a token of a row is known."""
OPENS_WITHIN = 16
"""Tokens within which a thought begins, or never does."""


class Thought:
    """Progress of one row's thought; its output's tokens are passed in order."""

    def __init__(self, marks: ThinkingMarks, budget: int, output: Sequence[int] = ()) -> None:
        self._marks = marks
        self._budget = budget
        self._close = AllowedTokens((marks.close,))
        self._longest = max(map(len, marks.opens), default=0)
        self._num_tokens = 0
        """Tokens of the thought, or of the output before the thought has begun."""
        self._has_begun = marks.has_begun
        self._tail: tuple[int, ...] = ()
        self.is_over = False
        """Nothing more is to be ended."""
        self.extend(output)

    @property
    def forced(self) -> AllowedTokens | None:
        """Return the one token that ends it now; None if it may go on."""
        spent = self._has_begun and self._num_tokens >= self._budget
        return self._close if spent and not self.is_over else None

    @property
    def may_end_unseen(self) -> bool:
        """Return whether the thought may have to end before tokens in flight are known."""
        return not self.is_over and self._num_tokens * self._has_begun + AHEAD >= self._budget

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the output."""
        for token in tokens:
            if self.is_over:
                return
            self._num_tokens += 1
            if self._has_begun:
                self.is_over = token == self._marks.close
            else:
                self._look_for_begin(token)

    def copy(self) -> Thought:
        """Return an independent copy."""
        other = Thought(self._marks, self._budget)
        other._num_tokens, other._has_begun = self._num_tokens, self._has_begun
        other._tail, other.is_over = self._tail, self.is_over
        return other

    def _look_for_begin(self, token: int) -> None:
        self._tail = (*self._tail, token)[-self._longest :]
        if any(self._tail[-len(each) :] == tuple(each) for each in self._marks.opens):
            self._has_begun, self._num_tokens = True, 0
        else:
            self.is_over = self._num_tokens >= OPENS_WITHIN
