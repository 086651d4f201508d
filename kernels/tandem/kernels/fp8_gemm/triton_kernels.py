"""Jit code of products with fp8 weights, a program a tile of the result."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows"])
def multiply_blocks(
    x, weight, scale, bias, out, rows, outputs, inner, x_row, weight_row, scale_row,
    BM: tl.constexpr, BN: tl.constexpr, BLOCK: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Compute out = x @ (weight * scale of its block).T + bias. Grid: (tiles of outputs, tiles of
    rows).

    x [rows, inner], weight [outputs, inner] of e4m3, one float32 scale
    per block of BLOCK x BLOCK, each with a row stride; out [rows, outputs] dense. BN divides BLOCK,
    so a tile has one scale per step.
    """
    first = tl.program_id(0) * BN
    n = first + tl.arange(0, BN)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    k = tl.arange(0, BLOCK)
    keep_n, keep_m = n < outputs, m < rows
    x_at = x + m.to(tl.int64)[:, None] * x_row + k[None, :]
    weight_at = weight + n.to(tl.int64)[None, :] * weight_row + k[:, None]
    scale_at = scale + (first // BLOCK) * scale_row
    sums = tl.zeros((BM, BN), tl.float32)
    for start in range(0, inner, BLOCK):
        keep_k = start + k < inner
        a = tl.load(x_at, mask=keep_m[:, None] & keep_k[None, :], other=0.0)
        codes = tl.load(weight_at, mask=keep_k[:, None] & keep_n[None, :], other=0.0)
        product = tl.dot(a, codes.to(a.dtype), input_precision="ieee")
        sums += product * tl.load(scale_at)
        x_at += BLOCK
        weight_at += BLOCK
        scale_at += 1
    if BIAS:
        sums += tl.load(bias + n, mask=keep_n, other=0.0).to(tl.float32)[None, :]
    at = out + m.to(tl.int64)[:, None] * outputs + n[None, :]
    tl.store(at, sums.to(out.dtype.element_ty), mask=keep_m[:, None] & keep_n[None, :])
