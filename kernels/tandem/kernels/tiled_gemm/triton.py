"""Product in Gluon for few rows; more rows multiply decoded values in cuBLAS.

Roofline: at few rows, the bytes of codes and scales over the memory's read rate; at many,
operations.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.kernels.gemm import linear
from tandem.kernels.launch import dependent

from .tiles import ADDENDS, BLOCK, TILE, WORDS, TiledWeight
from .triton_kernels import decode_tiles

FEW_ROWS = 256
"""Rows up to which the codes are read again for each 64 of them."""
_AT_ONCE = 64


def tiled_linear(
    x: Tensor, weight: TiledWeight, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """See the wrapper."""
    x = x if x.stride(1) == 1 else x.contiguous()
    if not _streams(x):
        return linear(x, decoded(weight), bias, out_dtype=out_dtype)
    out = torch.empty(x.shape[0], weight.outputs, dtype=out_dtype, device=x.device)
    _multiply(x, weight, out, bias, None)
    return out


def tiled_linear_add(x: Tensor, weight: TiledWeight, residual: Tensor) -> None:
    """See the wrapper."""
    x = x if x.stride(1) == 1 else x.contiguous()
    if _streams(x):
        _multiply(x, weight, residual, None, residual)
    else:
        residual.add_(tiled_linear(x, weight, None, residual.dtype))


def decoded(weight: TiledWeight) -> Tensor:
    """Return the values [out, in]."""
    outputs, inner = weight.outputs, weight.inner
    out = torch.empty(outputs, inner, dtype=weight.dtype, device=weight.words.device)
    decode_tiles[(outputs // TILE, inner // BLOCK)](
        weight.words,
        weight.scales.view(weight.dtype),
        out,
        inner,
        ADDEND=ADDENDS[weight.dtype],
        GROUPS=weight.groups,
        TILE=TILE,
        BLOCK=BLOCK,
        WORDS=WORDS,
        **dependent(out.device),
    )
    return out


def _streams(x: Tensor) -> bool:
    return x.is_cuda and 0 < x.shape[0] <= FEW_ROWS and x.data_ptr() % 16 == 0


def _multiply(
    x: Tensor, weight: TiledWeight, out: Tensor, bias: Tensor | None, residual: Tensor | None
) -> None:
    from . import gluon  # requires Triton's Gluon

    for first in range(0, x.shape[0], _AT_ONCE):
        rows = slice(first, first + _AT_ONCE)
        added = None if residual is None else residual[rows]
        gluon.multiply(x[rows], weight, out[rows], bias=bias, residual=added)
