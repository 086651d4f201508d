"""Jit code of RMSNorm, a program a row, with or without the residual addition before it."""

from __future__ import annotations

import triton
import triton.language as tl

from tandem.kernels.launch.triton_kernels import let_go


@triton.jit
def norm_rows(
    x, residual, weight, out, x_row, residual_row, dim, eps,
    ADD: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out = x / sqrt(mean(x^2) + eps) * weight, of one row. Grid: (rows,).

    x [rows, dim] and residual [rows, dim] with row strides, weight [dim], out [rows, dim] dense;
    WIDTH >= dim, a power of two. With ADD, x + residual rounded to its type is stored in residual
    and normed. The weight does not depend on the kernel before and is loaded while that ends.
    """
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, WIDTH)
    keep = col < dim
    gain = tl.load(weight + col, mask=keep, other=0.0).to(tl.float32)
    let_go(PDL)
    value = tl.load(x + row * x_row + col, mask=keep, other=0.0).to(tl.float32)
    if ADD:
        stream = residual + row * residual_row + col
        value += tl.load(stream, mask=keep, other=0.0).to(tl.float32)
        rounded = value.to(residual.dtype.element_ty)
        tl.store(stream, rounded, mask=keep)
        value = rounded.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, 0) / dim + eps)
    tl.store(out + row * dim + col, (value * scale * gain).to(out.dtype.element_ty), mask=keep)
