"""What grammars allow, applied to logits.

A grammar outranks every other mask: where nothing of it is left by them, the best token that it
allows comes back.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.engine.sample.transfer import counting, index_on, on_device
from tandem.kernels.sampling import keep_bits

PART = 64
"""Rows at a time: bounds what their copies take of the device."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bits of some rows of logits."""

    rows: Tensor
    """int64 [bounded]."""
    words: Tensor
    """int32 [bounded, ceil(vocabulary / 32)], the lowest bit the lowest id; where the logits are.
    """

    @classmethod
    def of(cls, rows: Sequence[int], words: Tensor, device: torch.device) -> Bounds:
        """From int32 words on the host, a row for each of ``rows``."""
        return cls(index_on(rows, device), on_device(words, device))

    def best(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Each row's best token that is allowed (int64) and its logit: before other masks."""
        found = []
        for rows, words in self._parts():
            part = logits.index_select(0, rows)
            keep_bits(part, words, counting(len(rows), logits.device))
            found.append(part.max(-1))
        return torch.cat([each.indices for each in found]), torch.cat([e.values for e in found])

    def keep(self, logits: Tensor, best: tuple[Tensor, Tensor] | None = None) -> None:
        """-inf for every token that a row's bits do not allow, in place. ``best`` as it was before
        other masks, if there were any: comes back where they left nothing."""
        if best is None:
            keep_bits(logits, self.words, self.rows)
            return
        at = 0
        for rows, words in self._parts():
            tokens, values = (each[at : at + len(rows), None] for each in best)
            part = logits.index_select(0, rows)
            barred = part == -math.inf  # by other masks
            keep_bits(part, words, counting(len(rows), logits.device))
            part.masked_fill_(barred, -math.inf)
            empty = part.amax(-1, keepdim=True) == -math.inf
            part.scatter_(1, tokens, torch.where(empty, values, part.gather(1, tokens)))
            logits.index_copy_(0, rows, part)
            at += len(rows)

    def _parts(self) -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(0, len(self.rows), PART):
            yield self.rows[start : start + PART], self.words[start : start + PART]
