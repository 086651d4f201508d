"""The tokens that one row has seen, kept so that a step costs one addition and not a recount."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor

_ROOM = 64
"""Tokens that a fresh row has room for; doubled when full."""


class SeenTokens:
    """Distinct tokens and how often each was emitted; 0 for those that only the prompt has."""

    def __init__(self, prompt: Iterable[int], output: Iterable[int]) -> None:
        counts = Counter(output)
        counts.update(dict.fromkeys(prompt, 0))
        self._slots = {token: slot for slot, token in enumerate(counts)}
        room = max(_ROOM, 2 * len(counts))
        self._tokens = torch.zeros(room, dtype=torch.int64)
        self._counts = torch.zeros(room, dtype=torch.float32)
        self._tokens[: len(counts)] = torch.tensor(list(counts), dtype=torch.int64)
        self._counts[: len(counts)] = torch.tensor(list(counts.values()), dtype=torch.float32)

    @property
    def tokens(self) -> Tensor:
        """int64 [distinct]; valid until the next ``add``."""
        return self._tokens[: len(self._slots)]

    @property
    def counts(self) -> Tensor:
        """float32 [distinct], parallel to ``tokens``."""
        return self._counts[: len(self._slots)]

    def add(self, token: int) -> None:
        """The token was emitted once more."""
        slot = self._slots.get(token)
        if slot is None:
            slot = self._slots[token] = len(self._slots)
            self._make_room(slot)
            self._tokens[slot] = token
        self._counts[slot] += 1

    def _make_room(self, slot: int) -> None:
        if slot == self._tokens.numel():
            self._tokens = torch.cat([self._tokens, torch.zeros_like(self._tokens)])
            self._counts = torch.cat([self._counts, torch.zeros_like(self._counts)])
