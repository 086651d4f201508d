"""Jit code of products with few rows for Hopper: the weight streams through shared memory.

`GROUP` tiles of `BN` outputs are multiplied with the same rows of x. A group's inner dimension is
cut into `SPLIT` pieces, distributed over at most one program per multiprocessor. A producer warp
copies `BK` of the inner dimension by TMA into a ring of `STAGES`, with weights before the kernel
ahead has ended. A warpgroup multiplies, with the weight as the left operand.

The last program of a split group adds the parts in a fixed order, so that results do not vary.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tandem.kernels.launch.gluon_kernels import barrier, load_box, release, wait


@gluon.jit
def _copy_weights(
    w_desc, ws, full, i, group, k, half,
    BN: gl.constexpr, GROUP: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    SIZE: gl.constexpr = BN // 2
    for g in gl.static_range(GROUP):
        tile = group * GROUP + g
        if GATED:
            for part in gl.static_range(2):
                load_box(
                    w_desc,
                    [tile * SIZE + part * half, k],
                    full.index(i),
                    ws.index(i * GROUP + g).slice(part * SIZE, SIZE, dim=0),
                )
        else:
            load_box(w_desc, [tile * BN, k], full.index(i), ws.index(i * GROUP + g))


@gluon.jit
def _share(pieces):
    """Return this program's pieces: first, and number."""
    me = gl.program_id(0)
    first = me * pieces // gl.num_programs(0)
    return first, (me + 1) * pieces // gl.num_programs(0) - first


@gluon.jit
def _place(step, first, length, BK: gl.constexpr, SPLIT: gl.constexpr):
    """Return the group and first inner index of a step."""
    piece = first + step // length
    return piece // SPLIT, (piece % SPLIT * length + step % length) * BK


@gluon.jit
def _producer(
    w_desc, x_desc, ws, xs, full, empty, length, pieces, half,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr,
    SPLIT: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    BYTES: gl.constexpr = (GROUP * BN + BM) * BK * 2
    first, mine = _share(pieces)
    count = mine * length
    ring = gl.minimum(count, STAGES)
    for s in range(ring):
        group, k = _place(s, first, length, BK, SPLIT)
        mbarrier.expect(full.index(s), BYTES)
        _copy_weights(w_desc, ws, full, s, group, k, half, BN, GROUP, GATED)
    wait(PDL)
    release(PDL)
    for s in range(ring):
        _, k = _place(s, first, length, BK, SPLIT)
        load_box(x_desc, [0, k], full.index(s), xs.index(s))
    for s in range(ring, count):
        group, k = _place(s, first, length, BK, SPLIT)
        i = s % STAGES
        mbarrier.wait(empty.index(i), ((s // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(i), BYTES)
        _copy_weights(w_desc, ws, full, i, group, k, half, BN, GROUP, GATED)
        load_box(x_desc, [0, k], full.index(i), xs.index(i))


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
def _halves(acc, BN: gl.constexpr, BM: gl.constexpr, GATED: gl.constexpr, L: gl.constexpr):
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
def _multiply(
    ws, xs, full, empty, begin, end,
    BM: gl.constexpr, BN: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, ML: gl.constexpr,
):  # fmt: skip
    """Return sums over steps begin..end of each tile of a group: float32 [BN, BM] in layout ML."""
    sums = ()
    for _ in gl.static_range(GROUP):
        zeros = gl.zeros([BN, BM], gl.float32, ML)
        sums = sums + (zeros,)  # type: ignore[assignment]  # noqa: RUF005
    for step in range(begin, end):
        i = step % STAGES
        mbarrier.wait(full.index(i), (step // STAGES) & 1)
        x = xs.index(i).permute((1, 0))
        products = ()
        for g in gl.static_range(GROUP):
            w = ws.index(i * GROUP + g)
            product = warpgroup_mma(w, x, sums[g], is_async=True)
            products = products + (product,)  # type: ignore[assignment]  # noqa: RUF005
        if GROUP == 1:
            sums = (warpgroup_mma_wait(0, deps=products),)  # type: ignore[assignment]
        else:
            sums = warpgroup_mma_wait(0, deps=products)
        mbarrier.arrive(empty.index(i), count=1)
    return sums


@gluon.jit
def _consumer(
    ws, xs, full, empty, length, pieces, bias, residual, out, partials, counters,
    rows, outputs, residual_row,
    BM: gl.constexpr, BN: gl.constexpr, GROUP: gl.constexpr, SPLIT: gl.constexpr,
    STAGES: gl.constexpr,
    GATED: gl.constexpr, ADD: gl.constexpr, BIAS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    ML: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BM, 16]
    )
    L: gl.constexpr = gl.BlockedLayout([4, 1], [8, 4], [1, 4], [0, 1])
    SIZE: gl.constexpr = BN // 2 if GATED else BN
    CHUNK: gl.constexpr = min(SIZE, 8192 // (BM * SPLIT))
    wait(PDL)
    first, mine = _share(pieces)
    for at in range(mine):
        piece = first + at
        group = piece // SPLIT
        sums = _multiply(
            ws, xs, full, empty, at * length, (at + 1) * length, BM, BN, GROUP, STAGES, ML
        )
        if SPLIT == 1:
            for g in gl.static_range(GROUP):
                n0 = (group * GROUP + g) * SIZE
                acc, up = _halves(sums[g], BN, BM, GATED, L)
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


@gluon.jit(do_not_specialize=["rows", "length", "pieces"])
def multiply_stream(
    w_desc, x_desc, bias, residual, out, partials, counters,
    rows, outputs, residual_row, length, pieces,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr,
    SPLIT: gl.constexpr, STAGES: gl.constexpr,
    GATED: gl.constexpr, ADD: gl.constexpr, BIAS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Multiply up to BM rows with a weight. Grid: at most `pieces` programs, 4 warps.

    w_desc: [outputs, inner], boxes [BN, BK]; with GATED twice the outputs, the second half from row
    `outputs` on, and boxes [BN / 2, BK]. x_desc: [rows, inner], boxes [BM, BK]. `length` is inner /
    BK / SPLIT, `pieces` the groups times SPLIT. residual (with ADD, stored to) [rows, outputs] with
    a row stride, out [rows, outputs] dense; partials float32 [pieces * GROUP, BM, BN]; counters
    int32 [groups], zero between launches.
    """
    ws = gl.allocate_shared_memory(w_desc.dtype, [STAGES * GROUP, BN, BK], w_desc.layout)
    xs = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BM, BK], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consumer, (
                ws, xs, full, empty, length, pieces, bias, residual, out, partials, counters,
                rows, outputs, residual_row, BM, BN, GROUP, SPLIT, STAGES, GATED, ADD, BIAS, PDL,
            )),
            (_producer, (
                w_desc, x_desc, ws, xs, full, empty, length, pieces, outputs,
                BM, BN, BK, GROUP, SPLIT, STAGES, GATED, PDL,
            )),
        ],
        [1],
        [24],
    )  # fmt: skip
