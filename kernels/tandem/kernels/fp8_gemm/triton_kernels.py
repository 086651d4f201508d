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


@triton.jit
def round_block(values):
    """Return float32 values [rows, BLOCK] in e4m3, and a scale for each row."""
    scale = tl.maximum(tl.max(tl.abs(values), 1), 1e-10) / 448.0
    return (values / scale[:, None]).to(tl.float8e4nv), scale


@triton.jit(do_not_specialize=["rows", "scale_block"])
def round_rows(
    x, codes, scales, rows, inner, x_row, scale_block, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    """Round x [rows, inner] to codes (dense) and scales [blocks, rows]. Grid: (rows / ROWS, blocks
    of inner)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    keep = (row < rows)[:, None] & (k < inner)[None, :]
    values = tl.load(x + row.to(tl.int64)[:, None] * x_row + k[None, :], mask=keep, other=0.0)
    rounded, scale = round_block(values.to(tl.float32))
    tl.store(codes + row.to(tl.int64)[:, None] * inner + k[None, :], rounded, mask=keep)
    tl.store(scales + tl.program_id(1) * scale_block + row, scale, mask=row < rows)


@triton.jit(do_not_specialize=["rows"])
def multiply_few(
    x, weight, scale, bias, residual, out, parts, rows, outputs, inner, x_row, scale_row,
    residual_row, BM: tl.constexpr, BN: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
    BIAS: tl.constexpr, ADDS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute as ``multiply_blocks`` for at most BM rows, whose x is rounded to e4m3 here. Grid:
    (tiles of outputs, PARTS of inner).

    weight is uint8, bits of e4m3. It is the first operand, as tensor cores take at least 64 of its
    rows.
    Sums of several parts go to parts, float32 [PARTS, BM, outputs].
    """
    first, part = tl.program_id(0) * BN, tl.program_id(1)
    n, m, k = first + tl.arange(0, BN), tl.arange(0, BM), tl.arange(0, BLOCK)
    blocks = tl.cdiv(inner, BLOCK)
    each = tl.cdiv(blocks, PARTS)
    keep_n, keep_m = n < outputs, m < rows
    sums = tl.zeros((BN, BM), tl.float32)
    for block in tl.range(part * each, tl.minimum(part * each + each, blocks), num_stages=STAGES):
        at = block * BLOCK + k
        keep_k = at < inner
        w_keep, x_keep = keep_n[:, None] & keep_k[None, :], keep_m[:, None] & keep_k[None, :]
        w_at = weight + n.to(tl.int64)[:, None] * inner + at[None, :]
        w = tl.load(w_at, mask=w_keep, other=0).to(tl.float8e4nv, bitcast=True)
        values = tl.load(x + m[:, None] * x_row + at[None, :], mask=x_keep, other=0.0)
        rounded, of_x = round_block(values.to(tl.float32))
        of_w = tl.load(scale + (first // BLOCK) * scale_row + block)
        sums += tl.dot(w, tl.trans(rounded)) * (of_x * of_w)[None, :]
    keep = keep_n[:, None] & keep_m[None, :]
    if PARTS > 1:
        tl.store(parts + (part * BM + m)[None, :] * outputs + n[:, None], sums, mask=keep)
    else:
        if BIAS:
            sums += tl.load(bias + n, mask=keep_n, other=0.0).to(tl.float32)[:, None]
        if ADDS:
            old = tl.load(residual + m[None, :] * residual_row + n[:, None], mask=keep, other=0.0)
            sums += old.to(tl.float32)
        to = out + m[None, :] * (residual_row if ADDS else outputs) + n[:, None]
        tl.store(to, sums.to(out.dtype.element_ty), mask=keep)


@triton.jit
def add_parts(
    parts, bias, residual, out, outputs, residual_row,
    BM: tl.constexpr, PARTS: tl.constexpr, BN: tl.constexpr, BIAS: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    """Add the sums of ``multiply_few``. Grid: (rows, tiles of outputs)."""
    row = tl.program_id(0)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    keep = n < outputs
    sums = tl.zeros((BN,), tl.float32)
    for part in tl.static_range(PARTS):
        sums += tl.load(parts + (part * BM + row) * outputs + n, mask=keep, other=0.0)
    if BIAS:
        sums += tl.load(bias + n, mask=keep, other=0.0).to(tl.float32)
    if ADDS:
        sums += tl.load(residual + row * residual_row + n, mask=keep, other=0.0).to(tl.float32)
    to = out + row * (residual_row if ADDS else outputs) + n
    tl.store(to, sums.to(out.dtype.element_ty), mask=keep)


@triton.jit(do_not_specialize=["rows", "scale_block"])
def multiply_many(
    x_desc, w_desc, x_scale, w_scale, bias, out, rows, outputs, inner, scale_block, scale_row,
    BM: tl.constexpr, BN: tl.constexpr, BLOCK: tl.constexpr, TALL: tl.constexpr,
    BIAS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute the product of rounded rows: x codes [rows, inner] with scales [blocks, rows]. Grid:
    tiles, TALL of rows next to each other."""
    number, high, wide = tl.program_id(0), tl.cdiv(rows, BM), tl.cdiv(outputs, BN)
    group = number // (TALL * wide)
    size = tl.minimum(high - group * TALL, TALL)
    row = group * TALL + (number % (TALL * wide)) % size
    column = (number % (TALL * wide)) // size
    m, n = row * BM + tl.arange(0, BM), column * BN + tl.arange(0, BN)
    sums = tl.zeros((BM, BN), tl.float32)
    for block in tl.range(0, tl.cdiv(inner, BLOCK), num_stages=STAGES):
        codes = x_desc.load([row * BM, block * BLOCK])
        w = w_desc.load([column * BN, block * BLOCK])
        of_x = tl.load(x_scale + block * scale_block + m, mask=m < rows, other=0.0)
        of_w = tl.load(w_scale + (column * BN // BLOCK) * scale_row + block)
        sums += tl.dot(codes, w.T) * (of_x * of_w)[:, None]
    if BIAS:
        sums += tl.load(bias + n, mask=n < outputs, other=0.0).to(tl.float32)[None, :]
    at = out + m.to(tl.int64)[:, None] * outputs + n[None, :]
    keep = (m < rows)[:, None] & (n < outputs)[None, :]
    tl.store(at, sums.to(out.dtype.element_ty), mask=keep)
