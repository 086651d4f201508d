"""Product in Triton, and from some hundred rows in cuBLAS.

x of 16 bits is rounded to e4m3, so that products run on fp8 tensor cores. Roofline: at few rows,
one byte per weight over the memory's read rate; at many, operations.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from torch.nn.functional import ScalingType, scaled_mm
from triton.tools.tensor_descriptor import TensorDescriptor

from tandem.kernels.launch import generation, sm_count

from . import BLOCK
from .triton_kernels import (
    add_parts,
    multiply_blocks,
    multiply_few,
    multiply_many,
    round_rows,
)

FEW_ROWS = 64
"""Rows up to which tiles are narrow, so that all multiprocessors read the weight."""
_NARROW, _WIDE = 96, 256
"""Programs of the products of few rows: tiles below the first are cut into as many parts as make
the second."""
_MOST_PARTS = 8
_HOPPER = 9
_ROWS = 4
"""Rows in a multiple of which cuBLAS takes scales."""
_ALIGNED = 16
"""Inputs and outputs in a multiple of which cuBLAS and tensor descriptors require weights."""


def fp8_linear(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """See the wrapper."""
    rows, outputs = x.shape[0], weight.shape[0]
    out = torch.empty(rows, outputs, dtype=out_dtype, device=x.device)
    x = x if x.stride(1) == 1 else x.contiguous()
    if not rows:
        return out
    if x.dtype is torch.float32 or not _has_fp8_dots(x.device):
        _multiply_exact(x, weight, scale, bias, out)
    elif _are_few(rows, weight):
        _multiply_few(x, weight, scale, bias, None, out)
    else:
        return _multiply_rounded(x, weight, scale, bias, out)
    return out


def fp8_linear_add(x: Tensor, weight: Tensor, scale: Tensor, residual: Tensor) -> None:
    """See the wrapper."""
    x = x if x.stride(1) == 1 else x.contiguous()
    few = x.dtype is not torch.float32 and _has_fp8_dots(x.device)
    if x.shape[0] > 0 and few and _are_few(x.shape[0], weight):
        _multiply_few(x, weight, scale, None, residual, residual)
    else:
        residual.add_(fp8_linear(x, weight, scale, None, residual.dtype))


def rounded_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x [rows, in] as e4m3 and float32 scales [blocks of in, rows], with rows added up to a
    multiple of ``_ROWS``, whose content is undefined."""
    rows, inner = x.shape
    blocks, padded = triton.cdiv(inner, BLOCK), triton.cdiv(rows, _ROWS) * _ROWS
    codes = torch.empty(padded, inner, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(blocks, padded, device=x.device)
    at_once = min(16, triton.next_power_of_2(rows))
    round_rows[(triton.cdiv(rows, at_once), blocks)](
        x,
        codes,
        scales,
        rows,
        inner,
        x.stride(0),
        scales.stride(0),
        BLOCK=BLOCK,
        ROWS=at_once,
    )
    return codes, scales


def _has_fp8_dots(device: torch.device) -> bool:
    """Return whether the kernels run here: on Hopper, or in Triton's interpreter."""
    return device.type != "cuda" or generation(device) == _HOPPER


def _are_few(rows: int, weight: Tensor) -> bool:
    """Return whether one tile of rows reads the weight faster than ``multiply_many``; measured on
    an H200."""
    outputs, inner = weight.shape
    tiles: int = triton.cdiv(outputs, BLOCK)
    if inner % _ALIGNED or rows <= 16:
        return rows <= FEW_ROWS
    if rows <= 32:
        return tiles < sm_count(weight.device)
    return rows <= FEW_ROWS and inner >= 2 * outputs


def _multiply_few(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
) -> None:
    (rows, inner), outputs = x.shape, weight.shape[0]
    height, tiles = max(16, triton.next_power_of_2(rows)), triton.cdiv(outputs, BLOCK)
    parts = 1 if tiles > _NARROW else min(_MOST_PARTS, triton.next_power_of_2(_WIDE // tiles))
    parts = min(parts, triton.next_power_of_2(triton.cdiv(inner, BLOCK)))
    sums = out
    if parts > 1:
        sums = torch.empty(parts, height, outputs, device=x.device)
    multiply_few[(tiles, parts)](
        x,
        weight.view(torch.uint8),
        scale,
        x if bias is None else bias,
        x if residual is None else residual,
        out,
        sums,
        rows,
        outputs,
        inner,
        x.stride(0),
        scale.stride(0),
        0 if residual is None else residual.stride(0),
        BM=height,
        BN=BLOCK,
        BLOCK=BLOCK,
        PARTS=parts,
        BIAS=bias is not None,
        ADDS=residual is not None,
        STAGES=3,
        num_warps=4,
    )
    if parts > 1:
        width = 1024
        add_parts[(rows, triton.cdiv(outputs, width))](
            sums,
            x if bias is None else bias,
            x if residual is None else residual,
            out,
            outputs,
            0 if residual is None else residual.stride(0),
            BM=height,
            PARTS=parts,
            BN=width,
            BIAS=bias is not None,
            ADDS=residual is not None,
        )


def _multiply_rounded(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, out: Tensor
) -> Tensor:
    (rows, inner), outputs = x.shape, weight.shape[0]
    if inner % _ALIGNED or outputs % _ALIGNED:
        _multiply_exact(x, weight, scale, bias, out)
        return out
    codes, scales = rounded_rows(x)
    tiles = triton.cdiv(rows, 64) * triton.cdiv(outputs, BLOCK)
    in_blocks = not (inner % BLOCK or outputs % BLOCK)
    if rows <= FEW_ROWS or tiles <= sm_count(x.device) or not in_blocks or x.device.type != "cuda":
        _multiply_many(codes, scales, weight, scale, bias, out)
        return out
    found = scaled_mm(
        codes,
        weight.t(),
        scales.t(),
        ScalingType.BlockWise1x128,
        scale.t(),
        ScalingType.BlockWise128x128,
        output_dtype=out.dtype,
    )
    found = found[:rows]
    return found if bias is None else found.add_(bias)


def _multiply_many(
    codes: Tensor,
    scales: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    out: Tensor,
) -> None:
    (rows, outputs), inner = out.shape, codes.shape[1]
    height, width = 64, BLOCK
    multiply_many[(triton.cdiv(rows, height) * triton.cdiv(outputs, width),)](
        TensorDescriptor(codes, [rows, inner], [inner, 1], [height, BLOCK]),
        TensorDescriptor(weight, [outputs, inner], [weight.stride(0), 1], [width, BLOCK]),
        scales,
        scale,
        out if bias is None else bias,
        out,
        rows,
        outputs,
        inner,
        scales.stride(0),
        scale.stride(0),
        BM=height,
        BN=width,
        BLOCK=BLOCK,
        TALL=8,
        BIAS=bias is not None,
        STAGES=4,
        num_warps=4,
    )


def _multiply_exact(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, out: Tensor
) -> None:
    """Multiply without rounding x."""
    (rows, inner), outputs = x.shape, weight.shape[0]
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
