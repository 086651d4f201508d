"""Bits in plain torch, some rows at a time."""

from __future__ import annotations

import math

import torch
from torch import Tensor

LOWEST = -1e30
"""Minimum logit of an allowed token: above those of other tokens, and far enough from float32's end
for penalties and a low temperature."""
PART = 64
"""Rows per pass, which bounds the size of their copies."""


def keep_bits(logits: Tensor, words: Tensor, rows: Tensor) -> None:
    """See the wrapper."""
    if (rows < 0).any():
        words, rows = words[rows >= 0], rows[rows >= 0]
    places = torch.arange(8, dtype=torch.uint8, device=logits.device)
    for start in range(0, len(rows), PART):
        index, bits = rows[start : start + PART], words[start : start + PART].view(torch.uint8)
        spread = (bits.unsqueeze(-1) >> places).bitwise_and_(1).flatten(1)
        part = logits.index_select(0, index).clamp_(min=LOWEST)
        part.masked_fill_(spread[:, : logits.shape[1]] == 0, -math.inf)
        logits.index_copy_(0, index, part)
