"""Product in plain torch, a strip of outputs at a time, which bounds the memory of values."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from .tiles import TILE, TiledWeight, values_of

_STRIP = 16
"""Tiles per pass."""


def tiled_linear(
    x: Tensor, weight: TiledWeight, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """See the wrapper."""
    out = torch.empty(x.shape[0], weight.outputs, dtype=out_dtype, device=x.device)
    for first in range(0, weight.outputs // TILE, _STRIP):
        values = values_of(weight, slice(first, first + _STRIP))
        part = slice(first * TILE, first * TILE + len(values))
        found = linear(x.to(out_dtype), values.to(out_dtype))
        out[:, part] = found if bias is None else found + bias[part]
    return out


def tiled_linear_add(x: Tensor, weight: TiledWeight, residual: Tensor) -> None:
    """See the wrapper."""
    residual.add_(tiled_linear(x, weight, None, residual.dtype))
