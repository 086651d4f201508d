"""Product in Triton, and from some rows in cuBLAS, after a kernel that rounds the rows.

Roofline: at few rows, one byte per weight over the memory's read rate; at many, operations.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from tandem.kernels.launch import dependent

from . import MOST
from .triton_kernels import multiply_int8, round_rows, scale_sums

FEW_ROWS = 64
"""Rows up to which the kernel reads the weight faster than cuBLAS."""
_ALIGNED = 8
"""Inputs and outputs in a multiple of which cuBLAS requires weights."""
_WIDTH = 128
"""Outputs, and inputs at a time, of a tile."""
_NARROW, _WIDE = 96, 256
"""Programs of a product: tiles below the first are cut into as many parts as make the second."""
_MOST_PARTS = 8


def int8_linear(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """See the wrapper."""
    (rows, inner), outputs = x.shape, weight.shape[0]
    out = torch.empty(rows, outputs, dtype=out_dtype, device=x.device)
    if not rows:
        return out
    codes, of_rows = rounded(x if x.stride(1) == 1 else x.contiguous())
    if rows <= FEW_ROWS or inner % _ALIGNED or outputs % _ALIGNED or x.device.type != "cuda":
        sums = _multiplied(codes, weight)
    else:
        sums = torch._int_mm(codes, weight.t())[None]
    width = 1024
    scale_sums[(rows, triton.cdiv(outputs, width))](
        sums,
        of_rows,
        scale,
        out if bias is None else bias,
        out,
        outputs,
        sums.shape[1],
        PARTS=sums.shape[0],
        BN=width,
        BIAS=bias is not None,
        **dependent(x.device),
    )
    return out


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x as int8 [rows, in] and the float32 scale of each row."""
    rows, inner = x.shape
    codes = torch.empty(rows, inner, dtype=torch.int8, device=x.device)
    scales = torch.empty(rows, device=x.device)
    round_rows[(rows,)](
        x,
        codes,
        scales,
        inner,
        x.stride(0),
        MOST=MOST,
        BN=min(4096, triton.next_power_of_2(inner)),
        num_warps=8,
        **dependent(x.device),
    )
    return codes, scales


def _multiplied(codes: Tensor, weight: Tensor) -> Tensor:
    """Return int32 sums [parts, rows or more, out] of codes [rows, in]."""
    (rows, inner), outputs = codes.shape, weight.shape[0]
    height = max(16, min(FEW_ROWS, triton.next_power_of_2(rows)))
    wide, tall = triton.cdiv(outputs, _WIDTH), triton.cdiv(rows, height)
    parts = 1 if wide > _NARROW else min(_MOST_PARTS, triton.next_power_of_2(_WIDE // wide))
    parts = min(parts, triton.next_power_of_2(triton.cdiv(inner, _WIDTH)))
    sums = torch.empty(parts, tall * height, outputs, dtype=torch.int32, device=codes.device)
    multiply_int8[(wide, parts, tall)](
        codes,
        weight,
        sums,
        rows,
        outputs,
        inner,
        weight.stride(0),
        tall * height,
        BM=height,
        BN=_WIDTH,
        BK=_WIDTH,
        PARTS=parts,
        STAGES=3,
        num_warps=4,
        **dependent(codes.device),
    )
    return sums
