"""In plain torch, on any device: a block at a time, so that what lies between is a block's."""

from __future__ import annotations

import torch
from torch import Tensor

from . import LARGEST


def narrow(values: Tensor, out: Tensor) -> None:
    """See the wrapper."""
    bytes_, scales = _halves(out, values.shape[1], values.shape[2])
    for block, low, scale in zip(values, bytes_, scales, strict=True):
        most = torch.linalg.vector_norm(block, torch.inf, dim=1, dtype=torch.float32)
        scale.copy_((most / LARGEST).clamp_min_(torch.finfo(torch.float32).tiny))
        low.copy_(block / scale.unsqueeze(1))


def widen(packed: Tensor, out: Tensor) -> None:
    """See the wrapper."""
    bytes_, scales = _halves(packed, out.shape[1], out.shape[2])
    for block, low, scale in zip(out, bytes_, scales, strict=True):
        block.copy_(low.to(torch.float32).mul_(scale.unsqueeze(1)))


def _halves(packed: Tensor, rows: int, width: int) -> tuple[Tensor, Tensor]:
    """float8 [n, rows, width] and float32 [n, rows] of the packed bytes."""
    numbers = packed[:, : rows * width].view(torch.float8_e4m3fn)
    return numbers.view(len(packed), rows, width), packed[:, rows * width :].view(torch.float32)
