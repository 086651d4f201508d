"""The bad words of one row, ordered so that a step costs a look-up per length and not per word."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class BadWords:
    """Sequences whose last token is not drawn after the others; falsy when there are none."""

    def __init__(self, words: Sequence[tuple[int, ...]]) -> None:
        self.lookback = 0
        """Output tokens that must be known: one less than the longest word has."""
        self._always = torch.tensor(
            sorted({word[0] for word in words if len(word) == 1}), dtype=torch.int64
        )
        self._after: dict[int, dict[tuple[int, ...], list[int]]] = {}
        """By the number of tokens before the last, then by these."""
        for word in words:
            if len(word) > 1:
                ends = self._after.setdefault(len(word) - 1, {})
                ends.setdefault(word[:-1], []).append(word[-1])
                self.lookback = max(self.lookback, len(word) - 1)

    def __bool__(self) -> bool:
        return bool(self._after) or self._always.numel() > 0

    def forbidden(self, tail: Sequence[int]) -> Tensor:
        """int64: the tokens that would complete a word after the output's last tokens."""
        ends = [
            end
            for length, words in self._after.items()
            for end in words.get(tuple(tail[-length:]), ())
        ]
        if not ends:
            return self._always
        return torch.cat([self._always, torch.tensor(ends, dtype=torch.int64)])
