"""Reference in plain torch, a block at a time to bound the intermediate tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from . import LARGEST
from .codes import from_codes, to_codes


def narrow(values: Tensor, out: Tensor) -> None:
    """See the wrapper."""
    bytes_, scales = _halves(out, values.shape[1], values.shape[2])
    numbers = bytes_.view(torch.float8_e4m3fn)
    for block, low, scale in zip(values, numbers, scales, strict=True):
        wide = block.to(torch.float32)
        most = wide.abs().nan_to_num_(0.0, 0.0).amax(dim=1)  # rows may have unwritten numbers
        scale.copy_((most / LARGEST).clamp_min_(torch.finfo(torch.float32).tiny))
        low.copy_(wide / scale.unsqueeze(1))


def widen(packed: Tensor, out: Tensor) -> None:
    """See the wrapper."""
    bytes_, scales = _halves(packed, out.shape[1], out.shape[2])
    for block, low, scale in zip(out, bytes_, scales, strict=True):
        numbers = low.view(torch.float8_e4m3fn).to(torch.float32)  # NaN stays NaN
        block.copy_(numbers.mul_(scale.unsqueeze(1)))


def _halves(packed: Tensor, rows: int, width: int) -> tuple[Tensor, Tensor]:
    """Return uint8 [n, rows, width] and float32 [n, rows] of the packed bytes."""
    bytes_ = packed[:, : rows * width].view(len(packed), rows, width)
    return bytes_, packed[:, rows * width :].view(torch.float32)


def encode(values: Tensor, scales: Tensor, out: Tensor) -> None:
    """See the wrapper."""
    for block, codes in zip(values, out, strict=True):
        codes.copy_(to_codes(block, scales.unsqueeze(1)).view(-1))


def decode(codes: Tensor, scales: Tensor, out: Tensor) -> None:
    """See the wrapper."""
    for block, low in zip(out, codes, strict=True):
        wide = from_codes(low.view(block.shape), torch.float32)
        block.copy_(wide.mul_(scales.unsqueeze(1)))
