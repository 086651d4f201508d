"""Jit code of products of int8 weights and rounded rows."""

from __future__ import annotations

import triton
import triton.language as tl

from tandem.kernels.launch.triton_kernels import follow


@triton.jit
def round_rows(
    x, codes, scales, inner, x_row, MOST: tl.constexpr, BN: tl.constexpr, PDL: tl.constexpr
):
    """Round x [rows, inner] to codes int8 (dense) and scales float32 [rows]. Grid: (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BN)
    most = tl.zeros((BN,), tl.float32)
    follow(PDL)
    for start in range(0, inner, BN):
        values = tl.load(x + row * x_row + start + k, mask=start + k < inner, other=0.0)
        most = tl.maximum(most, tl.abs(values.to(tl.float32)))
    scale = tl.div_rn(tl.maximum(tl.max(most, 0), 1e-10), MOST)
    tl.store(scales + row, scale)
    for start in range(0, inner, BN):
        keep = start + k < inner
        values = tl.load(x + row * x_row + start + k, mask=keep, other=0.0).to(tl.float32)
        # 1.5 * 2**23 leaves no bits for a fraction, so that the sum is rounded, ties to even.
        found = (tl.div_rn(values, tl.zeros((BN,), tl.float32) + scale) + 12582912.0) - 12582912.0
        found = tl.minimum(tl.maximum(found, -MOST), MOST)
        tl.store(codes + row * inner + start + k, found.to(tl.int8), mask=keep)


@triton.jit(do_not_specialize=["rows", "height"])
def multiply_int8(
    x, weight, sums, rows, outputs, inner, weight_row, height,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute sums int32 [PARTS, height, outputs] of x int8 [rows, inner], dense, and weight int8
    [outputs, inner]. Grid: (tiles of outputs, PARTS of inner, tiles of rows)."""
    part = tl.program_id(1)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.program_id(2) * BM + tl.arange(0, BM)
    k = tl.arange(0, BK)
    keep_n, keep_m = n < outputs, m < rows
    blocks = tl.cdiv(inner, BK)
    each = tl.cdiv(blocks, PARTS)
    found = tl.zeros((BN, BM), tl.int32)
    follow(PDL)
    for block in tl.range(part * each, tl.minimum(part * each + each, blocks), num_stages=STAGES):
        at = block * BK + k
        keep_k = (at < inner)[None, :]
        w_at = weight + n.to(tl.int64)[:, None] * weight_row + at[None, :]
        w = tl.load(w_at, mask=keep_n[:, None] & keep_k, other=0)
        x_at = x + m.to(tl.int64)[:, None] * inner + at[None, :]
        values = tl.load(x_at, mask=keep_m[:, None] & keep_k, other=0)
        found = tl.dot(w, tl.trans(values), found, out_dtype=tl.int32)
    to = sums + (part * height + m).to(tl.int64)[None, :] * outputs + n[:, None]
    tl.store(to, found, mask=keep_n[:, None] & keep_m[None, :])


@triton.jit(do_not_specialize=["height"])
def scale_sums(
    sums, of_rows, scale, bias, out, outputs, height,
    PARTS: tl.constexpr, BN: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write the scaled sums of all parts, plus bias, to out [rows, outputs]. Grid: (rows, tiles of
    outputs)."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    keep = n < outputs
    follow(PDL)
    found = tl.zeros((BN,), tl.int32)
    for part in tl.static_range(PARTS):
        found += tl.load(sums + (part * height + row) * outputs + n, mask=keep, other=0)
    of_w = tl.load(scale + n, mask=keep, other=0.0)
    result = found.to(tl.float32) * tl.load(of_rows + row) * of_w
    if BIAS:
        result += tl.load(bias + n, mask=keep, other=0.0).to(tl.float32)
    tl.store(out + row * outputs + n, result.to(out.dtype.element_ty), mask=keep)
