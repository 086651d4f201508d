"""Jit code of products with fp8 weights, a program a tile of the result."""

from __future__ import annotations

import triton
import triton.language as tl

from tandem.kernels.launch.triton_kernels import follow, let_go


@triton.jit(do_not_specialize=["rows"])
def multiply_blocks(
    x, weight, scale, bias, out, rows, outputs, inner, x_row, weight_row, scale_row,
    BM: tl.constexpr, BN: tl.constexpr, BLOCK: tl.constexpr, BIAS: tl.constexpr,
    CHANNEL: tl.constexpr,
):  # fmt: skip
    """Compute out = x @ (weight * its scale).T + bias. Grid: (tiles of outputs, tiles of
    rows).

    x [rows, inner], weight [outputs, inner] of e4m3, one float32 scale
    per block of BLOCK x BLOCK, or with CHANNEL per output; each with a row stride; out [rows,
    outputs] dense. BN divides BLOCK, so a tile has one scale per step.
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
        if CHANNEL:
            sums += product
        else:
            sums += product * tl.load(scale_at)
            scale_at += 1
        x_at += BLOCK
        weight_at += BLOCK
    if CHANNEL:
        sums *= tl.load(scale + n, mask=keep_n, other=0.0)[None, :]
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
    x, codes, scales, rows, inner, x_row, scale_block,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Round x [rows, inner] to codes (dense) and scales [blocks, rows]. Grid: (rows / ROWS, blocks
    of inner). A scale for each row has one BLOCK of at least the row.

    With GATED x is [rows, 2 * inner], and silu(first half) * second half is rounded to x's type,
    then to codes.
    """
    let_go(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    keep = (row < rows)[:, None] & (k < inner)[None, :]
    at = x + row.to(tl.int64)[:, None] * x_row + k[None, :]
    values = tl.load(at, mask=keep, other=0.0).to(tl.float32)
    if GATED:
        up = tl.load(at + inner, mask=keep, other=0.0).to(tl.float32)
        values = (values / (1.0 + tl.exp(-values)) * up).to(x.dtype.element_ty).to(tl.float32)
    rounded, scale = round_block(values)
    tl.store(codes + row.to(tl.int64)[:, None] * inner + k[None, :], rounded, mask=keep)
    tl.store(scales + tl.program_id(1) * scale_block + row, scale, mask=row < rows)


@triton.jit(do_not_specialize=["scale_block"])
def round_normed_rows(
    x, gain, codes, scales, inner, x_row, scale_block, eps,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, BY_ROW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Round x [rows, inner] after RMSNorm with gain [inner], as ``round_rows``. Grid: (rows,).

    BLOCKS is a power of two, at least the blocks of a row, which share one scale with BY_ROW. The
    norm is rounded to the gain's type, like a separate one.
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    col = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    keep = col < inner
    factor = tl.load(gain + col, mask=keep, other=0.0).to(tl.float32)
    let_go(PDL)
    value = tl.load(x + row * x_row + col, mask=keep, other=0.0).to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(tl.sum(value * value, 1), 0) / inner + eps)
    normed = (value * inverse * factor).to(gain.dtype.element_ty).to(tl.float32)
    if BY_ROW:
        scale = tl.maximum(tl.max(tl.max(tl.abs(normed), 1), 0), 1e-10) / 448.0
        rounded = (normed / scale).to(tl.float8e4nv)
        tl.store(scales + row, scale)
    else:
        rounded, block_scale = round_block(normed)
        tl.store(scales + block * scale_block + row, block_scale, mask=block * BLOCK < inner)
    tl.store(codes + row * inner + col, rounded, mask=keep)


@triton.jit(do_not_specialize=["rows", "scale_block"])
def multiply_many(
    x_desc, w_desc, x_scale, w_scale, bias, residual, out, partials, counters,
    rows, outputs, inner, scale_block, scale_row, residual_row,
    BM: tl.constexpr, BN: tl.constexpr, BLOCK: tl.constexpr, TALL: tl.constexpr,
    PARTS: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, CHANNEL: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute the product of rounded rows: x codes [rows, inner] with scales [blocks, rows], or
    with CHANNEL [1, rows] and w_scale [outputs]. Grid: tiles, TALL of rows next to each other, each
    in PARTS of inner.

    The last program of a tile adds its parts in their order: partials float32 [tiles, PARTS, BM,
    BN]; counters int32 [tiles], zero between launches. With ADD out is the residual.
    """
    number, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    high, wide = tl.cdiv(rows, BM), tl.cdiv(outputs, BN)
    group = number // (TALL * wide)
    size = tl.minimum(high - group * TALL, TALL)
    row = group * TALL + (number % (TALL * wide)) % size
    column = (number % (TALL * wide)) // size
    m, n = row * BM + tl.arange(0, BM), column * BN + tl.arange(0, BN)
    share = tl.cdiv(inner, BLOCK) // PARTS
    follow(PDL)
    sums = tl.zeros((BM, BN), tl.float32)
    for block in tl.range(part * share, part * share + share, num_stages=STAGES):
        codes = x_desc.load([row * BM, block * BLOCK])
        w = w_desc.load([column * BN, block * BLOCK])
        product = tl.dot(codes, w.T)
        if CHANNEL:
            sums += product
        else:
            of_x = tl.load(x_scale + block * scale_block + m, mask=m < rows, other=0.0)
            of_w = tl.load(w_scale + (column * BN // BLOCK) * scale_row + block)
            sums += product * (of_x * of_w)[:, None]
    last = True
    if PARTS > 1:
        place = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
        parts = partials + number.to(tl.int64) * (PARTS * BM * BN) + place
        tl.store(parts + part * (BM * BN), sums)
        tl.debug_barrier()
        last = tl.atomic_add(counters + number, 1, sem="acq_rel") == PARTS - 1
        if last:
            tl.store(counters + number, 0)
            sums = tl.zeros((BM, BN), tl.float32)
            for each in tl.static_range(PARTS):
                sums += tl.load(parts + each * (BM * BN), cache_modifier=".cg")
    if last:
        keep = (m < rows)[:, None] & (n < outputs)[None, :]
        if CHANNEL:
            of_x = tl.load(x_scale + m, mask=m < rows, other=0.0)
            of_w = tl.load(w_scale + n, mask=n < outputs, other=0.0)
            sums *= of_x[:, None] * of_w[None, :]
        if BIAS:
            sums += tl.load(bias + n, mask=n < outputs, other=0.0).to(tl.float32)[None, :]
        if ADD:
            at = residual + m.to(tl.int64)[:, None] * residual_row + n[None, :]
            sums += tl.load(at, mask=keep, other=0.0).to(tl.float32)
            tl.store(at, sums.to(residual.dtype.element_ty), mask=keep)
        else:
            at = out + m.to(tl.int64)[:, None] * outputs + n[None, :]
            tl.store(at, sums.to(out.dtype.element_ty), mask=keep)
