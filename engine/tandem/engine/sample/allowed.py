"""Tokens that alone may be drawn: a few as a list, many as bits that a device keeps."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import torch
from torch import Tensor

from tandem.engine.sample.transfer import on_device

FEW = 256
"""Ids that go to the device in each step; more go there once, as bits."""


class AllowedTokens:
    """Allowed tokens of one request: its choices share it."""

    def __init__(self, token_ids: Collection[int]) -> None:
        distinct = np.unique(np.fromiter(token_ids, dtype=np.int64, count=len(token_ids)))
        self.token_ids = torch.from_numpy(distinct)
        """int64, distinct."""
        self._words: Tensor | None = None
        """Words on the device of the last request."""

    @property
    def are_few(self) -> bool:
        """Return whether the list is cheaper than bits of the whole vocabulary."""
        return self.token_ids.numel() <= FEW

    def words_on(self, device: torch.device, vocabulary: int) -> Tensor:
        """Return the bits as int32 [ceil(vocabulary / 32)] on ``device``, the lowest bit the lowest
        id: see ``keep_bits``. Copied once."""
        if self._words is None or self._words.device != device:
            bits = np.zeros(-(-vocabulary // 32) * 32, dtype=np.bool_)
            bits[self.token_ids.numpy()] = True
            words = np.packbits(bits, bitorder="little").view(np.int32)
            self._words = on_device(torch.from_numpy(words), device)
        return self._words
