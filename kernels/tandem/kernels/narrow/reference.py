"""Reference in plain torch, a block at a time to bound the intermediate tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from . import LARGEST

_LIFT = 2.0**8
"""Factor between a float8's exponent and a float16's."""


def narrow(values: Tensor, out: Tensor) -> None:
    """See the wrapper."""
    bytes_, scales = _halves(out, values.shape[1], values.shape[2])
    numbers = bytes_.view(torch.float8_e4m3fn)
    for block, low, scale in zip(values, numbers, scales, strict=True):
        wide = block.to(torch.float32)
        most = wide.abs().amax(dim=1)
        scale.copy_((most / LARGEST).clamp_min_(torch.finfo(torch.float32).tiny))
        low.copy_(wide / scale.unsqueeze(1))


def widen(packed: Tensor, out: Tensor) -> None:
    """See the wrapper. A float8 is a float16 with an exponent less by 8: moving bits is faster on a
    CPU than converting."""
    bytes_, scales = _halves(packed, out.shape[1], out.shape[2])
    for block, low, scale in zip(out, bytes_, scales, strict=True):
        bits = low.to(torch.int16)
        moved = ((bits & 0x7F) << 7) | ((bits & 0x80) << 8)
        wide = moved.view(torch.float16).to(torch.float32)
        block.copy_(wide.mul_((scale * _LIFT).unsqueeze(1)))


def _halves(packed: Tensor, rows: int, width: int) -> tuple[Tensor, Tensor]:
    """Return uint8 [n, rows, width] and float32 [n, rows] of the packed bytes."""
    bytes_ = packed[:, : rows * width].view(len(packed), rows, width)
    return bytes_, packed[:, rows * width :].view(torch.float32)
