"""Product in Triton. Roofline: at few rows, one byte per weight over the memory's read rate."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from . import BLOCK
from .triton_kernels import multiply_blocks

FEW_ROWS = 64
"""Rows up to which tiles are narrow, so that all multiprocessors read the weight."""


def fp8_linear(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """See the wrapper."""
    (rows, inner), outputs = x.shape, weight.shape[0]
    out = torch.empty(rows, outputs, dtype=out_dtype, device=x.device)
    if not rows:
        return out
    x = x if x.stride(1) == 1 else x.contiguous()
    few = rows <= FEW_ROWS
    height = max(16, min(128, triton.next_power_of_2(rows)))
    width = 32 if few else 128
    multiply_blocks[(triton.cdiv(outputs, width), triton.cdiv(rows, height))](
        x,
        weight,
        scale,
        x if bias is None else bias,
        out,
        rows,
        outputs,
        inner,
        x.stride(0),
        weight.stride(0),
        scale.stride(0),
        BM=height,
        BN=width,
        BLOCK=BLOCK,
        BIAS=bias is not None,
        num_warps=4 if few else 8,
        num_stages=4 if few else 3,
    )
    return out
