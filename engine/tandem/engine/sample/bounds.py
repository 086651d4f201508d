"""What grammars allow, applied to logits: bits of tokens, unpacked on the device some rows at a
time.

A grammar outranks every other mask: where nothing of it is left by them, the best token that it
allows comes back.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.engine.sample.transfer import index_on, on_device

PART = 64
"""Rows at a time: bounds what their copies take of the device."""
LOWEST = -1e30
"""What an allowed token counts for that the model itself rules out: still above what is not
allowed, and far enough from float32's end for penalties and a low temperature."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bits of some rows of logits."""

    rows: Tensor
    """int64 [bounded]."""
    bits: Tensor
    """uint8 [bounded, vocabulary / 8], the lowest bit the lowest id; where the logits are."""

    @classmethod
    def of(cls, rows: Sequence[int], words: Sequence[Tensor], device: torch.device) -> Bounds:
        """From int32 words on the host, a tensor for each row."""
        bits = torch.stack(list(words)).view(torch.uint8)
        return cls(index_on(rows, device), on_device(bits, device))

    def best(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Each row's best token that is allowed (int64) and its logit: before other masks."""
        found = [part.max(-1) for _, part in self._within(logits, untouched=True)]
        return torch.cat([each.indices for each in found]), torch.cat([e.values for e in found])

    def keep(self, logits: Tensor, best: tuple[Tensor, Tensor] | None = None) -> None:
        """-inf for every token that a row's bits do not allow, in place. ``best`` as it was before
        other masks, if there were any: comes back where they left nothing."""
        at = 0
        for rows, part in self._within(logits, untouched=best is None):
            if best is not None:
                tokens, values = (each[at : at + len(rows), None] for each in best)
                empty = part.amax(-1, keepdim=True) == -math.inf
                part.scatter_(1, tokens, torch.where(empty, values, part.gather(1, tokens)))
            logits.index_copy_(0, rows, part)
            at += len(rows)

    def _within(self, logits: Tensor, *, untouched: bool) -> Iterator[tuple[Tensor, Tensor]]:
        """Rows, and their logits [rows, vocabulary] without what is not allowed: copies.
        ``untouched``: nothing is masked yet, so that -inf is the model's own word."""
        places = torch.arange(8, dtype=torch.uint8, device=logits.device)
        for start in range(0, len(self.rows), PART):
            rows, bits = (each[start : start + PART] for each in (self.rows, self.bits))
            spread = (bits.unsqueeze(-1) >> places).bitwise_and_(1).flatten(1)
            barred = spread[:, : logits.shape[1]] == 0
            part = logits.index_select(0, rows)
            if untouched:
                part.clamp_(min=LOWEST)
            yield rows, part.masked_fill_(barred, -math.inf)
