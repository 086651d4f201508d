"""Jit code of products with few rows: the weight is read once, at the speed of memory.

`multiply_one` takes one row: a program has whole rows of the weight, so bias and residual fold in.
`multiply_few` takes up to 64 rows: the weight is the left operand of the matrix unit, the inner
dimension may be split, and the last program adds the parts in a fixed order. Both prefetch weights
before the kernel ahead has ended.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tandem.kernels.launch.triton_kernels import follow, prefetch


@triton.jit
def _rows_of(w, row, col, w_row):
    at = w + row.to(tl.int64)[:, None] * w_row + col[None, :]
    return tl.load(at, eviction_policy="evict_first")


@triton.jit
def multiply_one(
    x, w, bias, residual, out, w_row,
    BN: tl.constexpr, BK: tl.constexpr, CHUNKS: tl.constexpr, ADD: tl.constexpr,
    BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute BN outputs of one row of x. Grid: (outputs / BN,).

    x [BK * CHUNKS] dense; w [outputs, BK * CHUNKS] with row stride w_row; bias, residual (with ADD,
    added to and stored to out) and out [outputs].
    """
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    weight = _rows_of(w, n, k, w_row)
    follow(PDL)
    rest = tl.zeros([BN], tl.float32)  # loaded early, so that the end need not wait
    if BIAS:
        rest += tl.load(bias + n).to(tl.float32)
    if ADD:
        rest += tl.load(residual + n).to(tl.float32)
    acc = tl.zeros([BN, BK], tl.float32)
    for chunk in tl.static_range(CHUNKS):
        if chunk > 0:
            weight = _rows_of(w + chunk * BK, n, k, w_row)
        value = tl.load(x + chunk * BK + k).to(tl.float32)
        acc += weight.to(tl.float32) * value[None, :]
    tl.store(out + n, (tl.sum(acc, 1) + rest).to(out.dtype.element_ty))


@triton.jit
def _dot(weight, rows, acc):
    return tl.dot(weight, tl.trans(rows), acc)


@triton.jit(do_not_specialize=["rows"])
def multiply_few(
    x, w, bias, residual, out, partials, counters, rows, outputs, half, x_row, w_row, residual_row,
    inner,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr,
    STAGES: tl.constexpr, LINES: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr,
    BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute BN outputs of up to BM rows, over a SPLIT-th of the inner dimension.

    Grid: (outputs / BN, SPLIT), without SPLIT under GATED. x [rows, inner] and w [outputs, inner]
    with row strides, BK * SPLIT dividing inner; with GATED w has twice the rows, the second half
    from row `half` on, and an output is silu(first) * second. residual and out [rows, outputs], out
    dense; partials float32 [SPLIT, rows, outputs]; counters int32 [outputs / BN], zero between
    launches. LINES of 128 bytes of each row of the weight are fetched ahead.
    """
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.arange(0, BM)
    k = tl.arange(0, BK)
    share = inner // SPLIT
    start = tl.program_id(1) * share
    here = w + n.to(tl.int64)[:, None] * w_row
    there = w + (n + half).to(tl.int64)[:, None] * w_row
    if PDL:
        line = tl.minimum(tl.arange(0, LINES) * 64, share - 1)
        prefetch((here + start + line[None, :]).to(tl.int64))
        if GATED:
            prefetch((there + start + line[None, :]).to(tl.int64))
    follow(PDL)
    acc = tl.zeros([BN, BM], tl.float32)
    up = tl.zeros([BN, BM], tl.float32)
    for at in tl.range(start, start + share, BK, num_stages=STAGES):
        weight = tl.load(here + at + k[None, :], eviction_policy="evict_first")
        value = tl.load(
            x + m[:, None] * x_row + at + k[None, :], mask=(m < rows)[:, None], other=0.0
        )
        acc = _dot(weight, value, acc)
        if GATED:
            second = tl.load(there + at + k[None, :], eviction_policy="evict_first")
            up = _dot(second, value, up)
    real = (m < rows)[None, :]
    place = m[None, :] * outputs + n[:, None]
    last = True
    if SPLIT > 1:
        tl.store(partials + tl.program_id(1) * rows * outputs + place, acc, mask=real)
        tl.debug_barrier()
        counter = counters + tl.program_id(0)
        last = tl.atomic_add(counter, 1, sem="acq_rel") == SPLIT - 1
        if last:
            tl.store(counter, 0)
            acc = tl.zeros([BN, BM], tl.float32)
            for part in tl.static_range(SPLIT):
                acc += tl.load(
                    partials + part * rows * outputs + place,
                    mask=real, other=0.0, cache_modifier=".cg",
                )  # fmt: skip
    if last:
        if BIAS:
            acc += tl.load(bias + n).to(tl.float32)[:, None]
        if GATED:
            acc = acc / (1.0 + tl.exp(-acc)) * up
        if ADD:
            old = tl.load(residual + m[None, :] * residual_row + n[:, None], mask=real, other=0.0)
            acc += old.to(tl.float32)
            place = m[None, :] * residual_row + n[:, None]
        tl.store(out + place, acc.to(out.dtype.element_ty), mask=real)
