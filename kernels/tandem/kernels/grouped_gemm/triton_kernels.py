"""Jit code of products with codes of groups, a program a tile of the result."""

from __future__ import annotations

import triton
import triton.language as tl

from tandem.kernels.launch.triton_kernels import follow


@triton.jit
def shifted(codes, zero, TYPE: tl.constexpr, BITS: tl.constexpr, FAST: tl.constexpr):
    """Return codes - zero in TYPE, which holds it exactly.

    FAST: 16-bit types get the code by their own bits, 0x4300 | code is 128 + code in bfloat16 and
    0x6400 | code is 1024 + code in float16.
    """
    if FAST and tl.bfloat16 == TYPE and BITS == 4:
        found = (codes.to(tl.uint16) | 0x4300).to(tl.bfloat16, bitcast=True)
        found = found - (zero + 128.0).to(tl.bfloat16)
    elif FAST and tl.float16 == TYPE:
        found = (codes.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True)
        found = found - (zero + 1024.0).to(tl.float16)
    else:
        found = (codes.to(tl.float32) - zero).to(TYPE)
    return found


@triton.jit
def zero_points(zeros, at, keep, HALF_RANGE: tl.constexpr, ZEROS: tl.constexpr):
    """Return float32 zero points of outputs; without ZEROS half of the range."""
    if ZEROS:
        found = tl.load(zeros + at, mask=keep, other=0).to(tl.float32)
    else:
        found = tl.zeros(at.shape, tl.float32) + HALF_RANGE
    return found


@triton.jit(do_not_specialize=["rows", "height"])
def multiply_codes(
    x, codes, scale, zeros, bias, residual, out, parts, rows, outputs, inner, x_row, codes_row,
    scale_row, zeros_row, residual_row, height,
    BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, ZEROS: tl.constexpr, BIAS: tl.constexpr,
    ADDS: tl.constexpr, FAST: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute out = x @ ((codes - zeros) * scale).T + bias (+ residual). Grid: (tiles of outputs,
    PARTS of inner, tiles of rows).

    The weight is the first operand, as tensor cores take at least 64 of its rows. Each step of
    WIDTH inputs has one group per output, whose scale multiplies float32 sums. GROUP 0 is all
    inputs. Sums of several parts go to parts, float32 [PARTS, height, outputs].
    """
    part = tl.program_id(1)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.program_id(2) * BM + tl.arange(0, BM)
    keep_n, keep_m = n < outputs, m < rows
    HALVES: tl.constexpr = 8 // BITS
    SPAN: tl.constexpr = BLOCK // HALVES
    WIDTH: tl.constexpr = GROUP if GROUP > 0 and GROUP < SPAN else SPAN
    HALF_RANGE: tl.constexpr = 1 << (BITS - 1)
    SIZE: tl.constexpr = GROUP if GROUP > 0 else 1
    k = tl.arange(0, WIDTH)
    blocks = tl.cdiv(inner, BLOCK)
    each = tl.cdiv(blocks, PARTS)
    sums = tl.zeros((BN, BM), tl.float32)
    follow(PDL)
    for block in tl.range(part * each, tl.minimum(part * each + each, blocks), num_stages=STAGES):
        for step in tl.static_range(SPAN // WIDTH):
            byte = block * SPAN + step * WIDTH + k
            held = keep_n[:, None]
            if BITS == 8:
                held = held & (byte < inner)[None, :]
            w_at = codes + n.to(tl.int64)[:, None] * codes_row + byte[None, :]
            w = tl.load(w_at, mask=held, other=0)
            for half in tl.static_range(HALVES):
                start = block * BLOCK + half * SPAN + step * WIDTH
                number = start // SIZE if GROUP > 0 else 0
                keep_g = keep_n & (start + n * 0 < inner)
                keep_x = keep_m[:, None] & (start + k < inner)[None, :]
                x_at = x + m.to(tl.int64)[:, None] * x_row + (start + k)[None, :]
                values = tl.load(x_at, mask=keep_x, other=0.0)
                zero = zero_points(zeros, number * zeros_row + n, keep_g, HALF_RANGE, ZEROS)
                code = (w >> (half * BITS)) & ((1 << BITS) - 1) if BITS == 4 else w
                whole = shifted(code, zero[:, None], values.dtype, BITS, FAST)
                of_w = tl.load(scale + number * scale_row + n, mask=keep_g, other=0.0)
                product = tl.dot(whole, tl.trans(values), input_precision="ieee")
                sums += product * of_w.to(tl.float32)[:, None]
    keep = keep_n[:, None] & keep_m[None, :]
    if PARTS > 1:
        at = parts + (part * height + m).to(tl.int64)[None, :] * outputs + n[:, None]
        tl.store(at, sums, mask=keep)
    else:
        if BIAS:
            sums += tl.load(bias + n, mask=keep_n, other=0.0).to(tl.float32)[:, None]
        if ADDS:
            old_at = residual + m.to(tl.int64)[None, :] * residual_row + n[:, None]
            sums += tl.load(old_at, mask=keep, other=0.0).to(tl.float32)
        to = out + m.to(tl.int64)[None, :] * (residual_row if ADDS else outputs) + n[:, None]
        tl.store(to, sums.to(out.dtype.element_ty), mask=keep)


@triton.jit(do_not_specialize=["height"])
def add_parts(
    parts, bias, residual, out, outputs, residual_row, height,
    PARTS: tl.constexpr, BN: tl.constexpr, BIAS: tl.constexpr, ADDS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Add the sums of ``multiply_codes``. Grid: (rows, tiles of outputs)."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    keep = n < outputs
    sums = tl.zeros((BN,), tl.float32)
    follow(PDL)
    for part in tl.static_range(PARTS):
        sums += tl.load(parts + (part * height + row) * outputs + n, mask=keep, other=0.0)
    if BIAS:
        sums += tl.load(bias + n, mask=keep, other=0.0).to(tl.float32)
    if ADDS:
        sums += tl.load(residual + row * residual_row + n, mask=keep, other=0.0).to(tl.float32)
    to = out + row * (residual_row if ADDS else outputs) + n
    tl.store(to, sums.to(out.dtype.element_ty), mask=keep)


@triton.jit
def decode(
    codes, scale, zeros, out, outputs, inner, codes_row, scale_row, zeros_row,
    BN: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr,
    ZEROS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write (codes - zeros) * scale to out [outputs, inner], dense. Grid: (tiles of outputs, blocks
    of inner). GROUP 0 is all inputs."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    keep_n = n < outputs
    HALVES: tl.constexpr = 8 // BITS
    SPAN: tl.constexpr = BLOCK // HALVES
    HALF_RANGE: tl.constexpr = 1 << (BITS - 1)
    SIZE: tl.constexpr = GROUP if GROUP > 0 else 1
    k = tl.arange(0, SPAN)
    byte = tl.program_id(1) * SPAN + k
    held = keep_n[:, None]
    if BITS == 8:
        held = held & (byte < inner)[None, :]
    w_at = codes + n.to(tl.int64)[:, None] * codes_row + byte[None, :]
    w = tl.load(w_at, mask=held, other=0)
    follow(PDL)
    for half in tl.static_range(HALVES):
        at = tl.program_id(1) * BLOCK + half * SPAN + k
        keep = keep_n[:, None] & (at < inner)[None, :]
        number = at // SIZE if GROUP > 0 else at * 0
        zero_at = number[None, :] * zeros_row + n[:, None]
        zero = zero_points(zeros, zero_at, keep, HALF_RANGE, ZEROS)
        of_w = tl.load(scale + number[None, :] * scale_row + n[:, None], mask=keep, other=0.0)
        code = (w >> (half * BITS)) & ((1 << BITS) - 1) if BITS == 4 else w
        values = (code.to(tl.float32) - zero) * of_w.to(tl.float32)
        to = out + n.to(tl.int64)[:, None] * inner + at[None, :]
        tl.store(to, values.to(out.dtype.element_ty), mask=keep)
