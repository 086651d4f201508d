"""The draw in plain torch: row by row, noise only for the tokens that are kept."""

from __future__ import annotations

import torch
from torch import Tensor

from .rng import exponentials


def draw(logits: Tensor, keys: Tensor, floor: Tensor | None) -> Tensor:
    """See the wrapper."""
    out = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    every = torch.arange(logits.shape[1], device=logits.device)
    for i, row in enumerate(logits):
        kept = every if floor is None else (row >= floor[i]).nonzero().view(-1)
        values = row if kept.numel() == row.numel() else row[kept]
        winner = (values - exponentials(keys[i], kept).log_()).argmax()
        out[i] = kept[winner]
    return out
