"""Merging two attention states in plain torch, by the weights of their sums of exponentials."""

from __future__ import annotations

import torch
from torch import Tensor


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """See the wrapper."""
    merged = torch.logaddexp(lse, other_lse)
    shift = torch.where(merged.isneginf(), 0.0, merged)
    mine, theirs = (lse - shift).exp(), (other_lse - shift).exp()
    result = out.float() * mine.unsqueeze(-1) + other.float() * theirs.unsqueeze(-1)
    return result.to(out.dtype), merged
