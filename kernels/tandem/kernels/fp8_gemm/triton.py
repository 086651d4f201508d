"""Products of rounded rows on Hopper: up to 64 rows in Gluon, from some hundred in cuBLAS.

Elsewhere, for float32 and for weights that are not in whole blocks, x is multiplied as it is.
Roofline: at few rows, one byte per weight over the memory's read rate; at many, operations.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from torch.nn.functional import ScalingType, scaled_mm
from triton.tools.tensor_descriptor import TensorDescriptor

from tandem.kernels.activation import silu_and_mul
from tandem.kernels.gemm.triton import room
from tandem.kernels.launch import dependent, generation, sm_count
from tandem.kernels.norm import rms_norm

from . import BLOCK, FP8Weight
from .rounding import RoundedRows, rounded_normed_rows, rounded_rows
from .triton_kernels import multiply_blocks, multiply_many

FEW_ROWS = 64
"""Rows up to which the weight is streamed once."""
_TALL = 64
"""Rows of a tile of ``multiply_many``."""
_HOPPER = 9


def fp8_linear(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """See the wrapper."""
    x = x if x.stride(1) == 1 else x.contiguous()
    if not _rounds(x.dtype, weight) or not x.shape[0]:
        return _multiply_exact(x, weight, scale, bias, out_dtype)
    return _multiply(
        rounded_rows(x, by_row=scale.dim() == 1), len(x), weight, scale, bias, out_dtype
    )


def fp8_linear_add(x: Tensor, weight: Tensor, scale: Tensor, residual: Tensor) -> None:
    """See the wrapper."""
    x = x if x.stride(1) == 1 else x.contiguous()
    if not _rounds(x.dtype, weight) or not x.shape[0]:
        residual.add_(_multiply_exact(x, weight, scale, None, residual.dtype))
    else:
        _add_product(rounded_rows(x, by_row=scale.dim() == 1), weight, scale, residual)


def fp8_norm_linear(
    x: Tensor, gain: Tensor, eps: float, weight: Tensor, scale: Tensor, bias: Tensor | None
) -> Tensor:
    """See the wrapper."""
    if not _rounds(gain.dtype, weight) or not x.shape[0]:
        return _multiply_exact(rms_norm(x, gain, eps), weight, scale, bias, gain.dtype)
    rows = rounded_normed_rows(x, gain, eps, by_row=scale.dim() == 1)
    return _multiply(rows, len(x), weight, scale, bias, gain.dtype)


def fp8_feed_forward(
    x: Tensor, gain: Tensor, eps: float, gate_up: FP8Weight, down: FP8Weight, residual: Tensor
) -> None:
    """See the wrapper."""
    count, dim = x.shape[0], down.codes.shape[1]
    both = _rounds(gain.dtype, gate_up.codes) and _rounds(gain.dtype, down.codes)
    if both and _streams(count, gain.dtype, down.codes):
        from . import gluon  # requires Triton's Gluon

        rows = rounded_normed_rows(x, gain, eps, by_row=gate_up.scale.dim() == 1)
        inner = torch.empty(count, dim, dtype=gain.dtype, device=x.device)
        gluon.multiply(rows, *gate_up, inner, gated=True)
        fp8_linear_add(inner, *down, residual)
        return
    halves = fp8_norm_linear(x, gain, eps, *gate_up, None)
    if both and count:
        rows = rounded_rows(halves, by_row=down.scale.dim() == 1, gated=True)
        _add_product(rows, *down, residual)
    else:
        fp8_linear_add(silu_and_mul(halves), *down, residual)


def _rounds(dtype: torch.dtype, weight: Tensor) -> bool:
    """Return whether rows of a type are rounded: on Hopper, or in Triton's interpreter, for weights
    in whole blocks."""
    here = weight.device.type != "cuda" or generation(weight.device) == _HOPPER
    whole = weight.shape[0] % BLOCK == 0 and weight.shape[1] % BLOCK == 0
    return here and whole and dtype is not torch.float32


def _streams(rows: int, dtype: torch.dtype, weight: Tensor) -> bool:
    return 0 < rows <= FEW_ROWS and weight.is_cuda and _rounds(dtype, weight)


def _multiply(
    rows: RoundedRows,
    count: int,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """Return the product of ``count`` rounded rows."""
    if _in_cublas(count, weight, scale, out_dtype):
        return _multiply_cublas(rows, count, weight, scale, bias, out_dtype)
    out = torch.empty(count, weight.shape[0], dtype=out_dtype, device=weight.device)
    _fill(rows, weight, scale, out, bias=bias)
    return out


def _add_product(rows: RoundedRows, weight: Tensor, scale: Tensor, residual: Tensor) -> None:
    if _in_cublas(len(residual), weight, scale, residual.dtype):
        found = _multiply_cublas(rows, len(residual), weight, scale, None, residual.dtype)
        residual.add_(found)
    else:
        _fill(rows, weight, scale, residual, residual=residual)


def _fill(
    rows: RoundedRows,
    weight: Tensor,
    scale: Tensor,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> None:
    if weight.is_cuda and len(out) <= FEW_ROWS:
        from . import gluon  # requires Triton's Gluon

        gluon.multiply(rows, weight, scale, out, bias=bias, residual=residual)
    else:
        _multiply_many(rows, weight, scale, out, bias, residual)


def _in_cublas(count: int, weight: Tensor, scale: Tensor, dtype: torch.dtype) -> bool:
    """Return whether cuBLAS multiplies: on a GPU, if there is a tile for every multiprocessor. With
    scales of outputs its results are bfloat16."""
    tiles = triton.cdiv(count, _TALL) * (weight.shape[0] // BLOCK)
    many = weight.is_cuda and count > FEW_ROWS and tiles > sm_count(weight.device)
    return many and (scale.dim() == 2 or dtype is torch.bfloat16)


def _multiply_cublas(
    rows: RoundedRows,
    count: int,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    blocks = scale.dim() == 2
    found = scaled_mm(
        rows.codes,
        weight.t(),
        rows.scales.t(),
        ScalingType.BlockWise1x128 if blocks else ScalingType.RowWise,
        scale.t() if blocks else scale[None],
        ScalingType.BlockWise128x128 if blocks else ScalingType.RowWise,
        output_dtype=out_dtype,
    )
    found = found[:count]
    return found if bias is None else found.add_(bias)


def _multiply_many(
    rows: RoundedRows,
    weight: Tensor,
    scale: Tensor,
    out: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
) -> None:
    (count, outputs), inner = out.shape, weight.shape[1]
    tiles, blocks = triton.cdiv(count, _TALL) * (outputs // BLOCK), inner // BLOCK
    most = 2 * sm_count(out.device) // tiles
    parts = next(n for n in (4, 2, 1) if n == 1 or (n <= most and blocks % n == 0))
    partials, counters = room(out.device) if parts > 1 else (out, out)
    multiply_many[(tiles * parts,)](
        TensorDescriptor(rows.codes, [count, inner], [inner, 1], [_TALL, BLOCK]),
        TensorDescriptor(weight, [outputs, inner], [weight.stride(0), 1], [BLOCK, BLOCK]),
        rows.scales,
        scale,
        out if bias is None else bias,
        out if residual is None else residual,
        out,
        partials,
        counters,
        count,
        outputs,
        inner,
        rows.scales.stride(0),
        scale.stride(0),
        0 if residual is None else residual.stride(0),
        BM=_TALL,
        BN=BLOCK,
        BLOCK=BLOCK,
        TALL=8,
        PARTS=parts,
        BIAS=bias is not None,
        ADD=residual is not None,
        CHANNEL=scale.dim() == 1,
        STAGES=4,
        num_warps=4,
        **dependent(out.device),
    )


def _multiply_exact(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """Return the product of x as it is."""
    (count, inner), outputs = x.shape, weight.shape[0]
    out = torch.empty(count, outputs, dtype=out_dtype, device=x.device)
    if not count:
        return out
    few = count <= FEW_ROWS
    height = max(16, min(128, triton.next_power_of_2(count)))
    width = 32 if few else 128
    multiply_blocks[(triton.cdiv(outputs, width), triton.cdiv(count, height))](
        x,
        weight,
        scale,
        x if bias is None else bias,
        out,
        count,
        outputs,
        inner,
        x.stride(0),
        weight.stride(0),
        scale.stride(0),
        BM=height,
        BN=width,
        BLOCK=BLOCK,
        BIAS=bias is not None,
        CHANNEL=scale.dim() == 1,
        num_warps=4 if few else 8,
        num_stages=4 if few else 3,
    )
    return out
