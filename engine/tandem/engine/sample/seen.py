"""Tokens that penalties use; a prompt's are found and copied once for all choices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.engine.sample.transfer import on_device

_ROOM = 64
"""First capacity of a row, doubled when full."""


class PromptTokens:
    """Distinct tokens of a prompt."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self.prompt = prompt
        self._distinct = frozenset(prompt)
        found = np.fromiter(self._distinct, dtype=np.int64, count=len(self._distinct))
        self._tokens = torch.from_numpy(found)

    def __contains__(self, token: int) -> bool:
        return token in self._distinct

    def on(self, device: torch.device) -> Tensor:
        """Return int64 [distinct] on ``device``; copied once."""
        if self._tokens.device != device:
            self._tokens = on_device(self._tokens, device)
        return self._tokens


class SeenTokens:
    """Distinct tokens that a row has emitted with their counts, and those of its prompt, if not
    None."""

    def __init__(self, prompt: PromptTokens | None, output: Iterable[int]) -> None:
        self.prompt = prompt
        counts = Counter(output)
        self._slots = {token: slot for slot, token in enumerate(counts)}
        self._tokens = _Numbers(np.int64, tuple(counts))
        self._counts = _Numbers(np.float32, tuple(counts.values()))
        new = () if prompt is None else tuple(each for each in counts if each not in prompt)
        self._new = _Numbers(np.int64, new)

    @property
    def tokens(self) -> Tensor:
        """Return the distinct emitted tokens, int64 [emitted]; valid until ``add``."""
        return self._tokens.values

    @property
    def counts(self) -> Tensor:
        """Return float32 [emitted], parallel to ``tokens``."""
        return self._counts.values

    @property
    def new_tokens(self) -> Tensor:
        """Return the emitted tokens (int64) that the prompt does not have."""
        return self._new.values

    def add(self, token: int) -> None:
        slot = self._slots.get(token)
        if slot is not None:
            self._counts.memory[slot] += 1
            return
        self._slots[token] = len(self._slots)
        self._tokens.append(token)
        self._counts.append(1)
        if self.prompt is not None and token not in self.prompt:
            self._new.append(token)

    def copy(self) -> SeenTokens:
        other = SeenTokens(self.prompt, ())
        other._slots = self._slots.copy()
        other._tokens, other._counts = self._tokens.copy(), self._counts.copy()
        other._new = self._new.copy()
        return other


class _Numbers:
    """Growing array."""

    def __init__(self, dtype: type[np.int64 | np.float32], numbers: Sequence[int] = ()) -> None:
        self._count = len(numbers)
        self.memory: NDArray[np.int64 | np.float32]
        self.memory = np.zeros(max(_ROOM, 2 * self._count), dtype=dtype)
        self.memory[: self._count] = numbers

    @property
    def values(self) -> Tensor:
        """Return the stored numbers, without a copy."""
        return torch.from_numpy(self.memory[: self._count])

    def append(self, number: int) -> None:
        if self._count == len(self.memory):
            self.memory = np.concatenate([self.memory, np.zeros_like(self.memory)])
        self.memory[self._count] = number
        self._count += 1

    def copy(self) -> _Numbers:
        other = _Numbers(self.memory.dtype.type)
        other.memory, other._count = self.memory.copy(), self._count
        return other
