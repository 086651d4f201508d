"""Shared code of the kernels that stream a weight through shared memory: shares and results.

The inner dimension of a tile, or of a group of tiles, is cut into SPLIT pieces, distributed over at
most one program per multiprocessor. The last program of a split group adds its pieces in a fixed
order, so that results do not vary.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tandem.kernels.launch.gluon_kernels import barrier


@gluon.jit
def share_of(pieces):
    """Return this program's pieces: first, and number."""
    me = gl.program_id(0)
    first = me * pieces // gl.num_programs(0)
    return first, (me + 1) * pieces // gl.num_programs(0) - first


@gluon.jit
def first_inner(piece, at, length, BK: gl.constexpr, SPLIT: gl.constexpr):
    """Return the first inner index of step `at` of a piece."""
    return (piece % SPLIT * length + at) * BK


@gluon.jit
def next_step(piece, at, length):
    """Return the piece and the step after a step."""
    ends = (at + 1 == length).to(gl.int32)
    return piece + ends, (at + 1) * (1 - ends)


@gluon.jit
def _old(
    n0, residual, rows, outputs, residual_row,
    SIZE: gl.constexpr, BM: gl.constexpr, ADD: gl.constexpr, L: gl.constexpr,
):  # fmt: skip
    """Return the addend of SIZE outputs of every row: float32 [SIZE, BM] in layout L."""
    if ADD:
        n = gl.expand_dims(n0 + gl.arange(0, SIZE, gl.SliceLayout(1, L)), 1)
        m = gl.expand_dims(gl.arange(0, BM, gl.SliceLayout(0, L)), 0)
        keep = (m < rows) & (n < outputs)
        old = gl.load(residual + m * residual_row + n, mask=keep, other=0.0).to(gl.float32)
    else:
        old = gl.zeros([SIZE, BM], gl.float32, L)
    return old


@gluon.jit
def _finish(
    acc, up, old, n0, bias, residual, out, rows, outputs, residual_row,
    SIZE: gl.constexpr, BM: gl.constexpr, GATED: gl.constexpr, ADD: gl.constexpr,
    BIAS: gl.constexpr, L: gl.constexpr,
):  # fmt: skip
    """Add bias, gate and residual to acc [SIZE, BM] in layout L, and store it."""
    n = gl.expand_dims(n0 + gl.arange(0, SIZE, gl.SliceLayout(1, L)), 1)
    m = gl.expand_dims(gl.arange(0, BM, gl.SliceLayout(0, L)), 0)
    keep = (m < rows) & (n < outputs)
    if BIAS:
        acc += gl.load(bias + n, mask=n < outputs, other=0.0).to(gl.float32)
    if GATED:
        acc = acc / (1.0 + gl.exp(-acc)) * up
    if ADD:
        acc += old
        there = residual + m * residual_row + n
        gl.store(there, acc.to(residual.dtype.element_ty), mask=keep)
    else:
        there = out + m * outputs + n
        gl.store(there, acc.to(out.dtype.element_ty), mask=keep)


@gluon.jit
def _sum_parts(
    partials, tile, row,
    SIZE: gl.constexpr, BN: gl.constexpr, BM: gl.constexpr, SPLIT: gl.constexpr, L: gl.constexpr,
):  # fmt: skip
    """Return outputs row.. of a tile, its parts added in their order."""
    n = gl.expand_dims(row + gl.arange(0, SIZE, gl.SliceLayout(1, L)), 1)
    m = gl.expand_dims(gl.arange(0, BM, gl.SliceLayout(0, L)), 0)
    at = partials + tile * (SPLIT * BN * BM) + m * BN + n
    acc = gl.load(at, cache_modifier=".cg")
    for part in gl.static_range(1, SPLIT):
        acc = acc + gl.load(at + part * (BN * BM), cache_modifier=".cg")
    return acc


@gluon.jit
def halves_of(acc, BN: gl.constexpr, BM: gl.constexpr, GATED: gl.constexpr, L: gl.constexpr):
    """Return a tile's sums [BN, BM] in layout L; with GATED those of gate and up."""
    if GATED:
        PAIRS: gl.constexpr = gl.BlockedLayout([4, 1, 2], [8, 4, 1], [1, 4, 1], [2, 0, 1])
        pairs = gl.permute(gl.reshape(acc, [2, BN // 2, BM]), (1, 2, 0))
        gate, up = gl.split(gl.convert_layout(pairs, PAIRS))
        gate = gl.convert_layout(gate, L)
        up = gl.convert_layout(up, L)
    else:
        gate = gl.convert_layout(acc, L)
        up = gate
    return gate, up


@gluon.jit
def store_sums(
    sums, piece, bias, residual, out, partials, counters, rows, outputs, residual_row,
    BM: gl.constexpr, BN: gl.constexpr, GROUP: gl.constexpr, SPLIT: gl.constexpr,
    GATED: gl.constexpr, ADD: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    """Store the sums of a piece, GROUP tensors [BN, BM], or add and store all pieces of a group."""
    L: gl.constexpr = gl.BlockedLayout([4, 1], [8, 4], [1, 4], [0, 1])
    SIZE: gl.constexpr = BN // 2 if GATED else BN
    CHUNK: gl.constexpr = min(SIZE, 8192 // (BM * SPLIT))
    group = piece // SPLIT
    if SPLIT == 1:
        for g in gl.static_range(GROUP):
            n0 = (group * GROUP + g) * SIZE
            acc, up = halves_of(sums[g], BN, BM, GATED, L)
            old = _old(n0, residual, rows, outputs, residual_row, SIZE, BM, ADD, L)
            _finish(
                acc, up, old, n0, bias, residual, out, rows, outputs, residual_row,
                SIZE, BM, GATED, ADD, BIAS, L,
            )  # fmt: skip
    else:
        n = gl.expand_dims(gl.arange(0, BN, gl.SliceLayout(1, L)), 1)
        m = gl.expand_dims(gl.arange(0, BM, gl.SliceLayout(0, L)), 0)
        for g in gl.static_range(GROUP):
            # Tile by tile, and of a tile part by part.
            place = (group * GROUP + g) * SPLIT + piece % SPLIT
            part = partials + place * (BN * BM) + m * BN + n
            gl.store(part, gl.convert_layout(sums[g], L))
        barrier()
        if gl.atomic_add(counters + group, 1, sem="acq_rel") == SPLIT - 1:
            gl.store(counters + group, 0)
            for chunk in range(GROUP * SIZE // CHUNK):
                tile = group * GROUP + chunk // (SIZE // CHUNK)
                row = chunk % (SIZE // CHUNK) * CHUNK
                n0 = tile * SIZE + row
                old = _old(n0, residual, rows, outputs, residual_row, CHUNK, BM, ADD, L)
                whole = _sum_parts(partials, tile, row, CHUNK, BN, BM, SPLIT, L)
                second = whole
                if GATED:
                    second = _sum_parts(partials, tile, SIZE + row, CHUNK, BN, BM, SPLIT, L)
                _finish(
                    whole, second, old, n0, bias, residual, out, rows, outputs, residual_row,
                    CHUNK, BM, GATED, ADD, BIAS, L,
                )  # fmt: skip
