"""Jit code of the norms, one program per row."""

from __future__ import annotations

import triton
import triton.language as tl

from tandem.kernels.launch.triton_kernels import let_go


@triton.jit
def norm_rows(
    x, weight, out, x_row, dim, eps,
    WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute out = x / sqrt(mean(x^2) + eps) * weight of one row. Grid: (rows,).

    x [rows, dim] with a row stride, weight [dim], out [rows, dim] dense; WIDTH >= dim, a power of
    two. The weight is loaded while the kernel before ends.
    """
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, WIDTH)
    keep = col < dim
    gain = tl.load(weight + col, mask=keep, other=0.0).to(tl.float32)
    let_go(PDL)
    value = tl.load(x + row * x_row + col, mask=keep, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, 0) / dim + eps)
    tl.store(out + row * dim + col, (value * scale * gain).to(out.dtype.element_ty), mask=keep)


@triton.jit
def add_layer_norm_rows(
    x, residual, gain, shift, out, x_row, residual_row, dim, eps,
    WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute out = (s - mean(s)) / sqrt(variance(s) + eps) * gain + shift of s = x + residual, of
    one row. Grid: (rows,).

    x, residual [rows, dim] with a row stride each; gain, shift [dim]; out [rows, dim] dense; WIDTH
    >= dim, a power of two. Sums are float32, the variance is of differences from the mean.
    """
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, WIDTH)
    keep = col < dim
    scale = tl.load(gain + col, mask=keep, other=0.0).to(tl.float32)
    offset = tl.load(shift + col, mask=keep, other=0.0).to(tl.float32)
    let_go(PDL)
    value = tl.load(x + row * x_row + col, mask=keep, other=0.0).to(tl.float32)
    value += tl.load(residual + row * residual_row + col, mask=keep, other=0.0).to(tl.float32)
    apart = tl.where(keep, value - tl.sum(value, 0) / dim, 0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(apart * apart, 0) / dim + eps)
    normed = apart * inverse * scale + offset
    tl.store(out + row * dim + col, normed.to(out.dtype.element_ty), mask=keep)
