"""Jit code of products with few rows for Hopper: the weight streams through shared memory.

A tile is `BN` outputs; its inner dimension is cut into `SPLIT` pieces, which are shared out
over at most a program a multiprocessor. A producer warp copies `BK` of the inner dimension by `BK`
into a ring of `STAGES`, by TMA; it fills the ring with weights before the kernel ahead has ended,
so that what lies between two products (norm, activation, the end of a sum) costs the memory
little. A warpgroup multiplies, with the weight as the left operand and the rows of x as the narrow
side.

The programs of a split tile leave their parts; the last of them to arrive adds the parts in a fixed
order, so that a result does not depend on who was faster. Launched by gluon.py.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

_load_box = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # before 3.9


@gluon.jit
def _wait(PDL: gl.constexpr):
    """As wait in launch/triton_kernels.py, which Gluon cannot call."""
    if PDL:
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def _release(PDL: gl.constexpr):
    """As release in launch/triton_kernels.py."""
    if PDL:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0",
            "=r",
            [],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )


@gluon.jit
def _copy_weight(w_desc, ws, full, i, tile, k, half, BN: gl.constexpr, GATED: gl.constexpr):
    if GATED:
        SIZE: gl.constexpr = BN // 2
        for part in gl.static_range(2):
            _load_box(
                w_desc,
                [tile * SIZE + part * half, k],
                full.index(i),
                ws.index(i).slice(part * SIZE, SIZE, dim=0),
            )
    else:
        _load_box(w_desc, [tile * BN, k], full.index(i), ws.index(i))


@gluon.jit
def _share(pieces):
    """This program's pieces: first, and how many."""
    me = gl.program_id(0)
    first = me * pieces // gl.num_programs(0)
    return first, (me + 1) * pieces // gl.num_programs(0) - first


@gluon.jit
def _place(step, first, length, BK: gl.constexpr, SPLIT: gl.constexpr):
    """Tile and first inner index of a step."""
    piece = first + step // length
    return piece // SPLIT, (piece % SPLIT * length + step % length) * BK


@gluon.jit
def _producer(
    w_desc, x_desc, ws, xs, full, empty, length, pieces, half,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, SPLIT: gl.constexpr,
    STAGES: gl.constexpr, GATED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    BYTES: gl.constexpr = (BN + BM) * BK * 2
    first, mine = _share(pieces)
    count = mine * length
    ring = gl.minimum(count, STAGES)
    for s in range(ring):
        tile, k = _place(s, first, length, BK, SPLIT)
        mbarrier.expect(full.index(s), BYTES)
        _copy_weight(w_desc, ws, full, s, tile, k, half, BN, GATED)
    _wait(PDL)
    _release(PDL)
    for s in range(ring):
        _, k = _place(s, first, length, BK, SPLIT)
        _load_box(x_desc, [0, k], full.index(s), xs.index(s))
    for s in range(ring, count):
        tile, k = _place(s, first, length, BK, SPLIT)
        i = s % STAGES
        mbarrier.wait(empty.index(i), ((s // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(i), BYTES)
        _copy_weight(w_desc, ws, full, i, tile, k, half, BN, GATED)
        _load_box(x_desc, [0, k], full.index(i), xs.index(i))


@gluon.jit
def _old(
    n0, residual, rows, outputs, residual_row,
    SIZE: gl.constexpr, BM: gl.constexpr, ADD: gl.constexpr, L: gl.constexpr,
):  # fmt: skip
    """What SIZE outputs of every row are added to: float32 [SIZE, BM] in layout L."""
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
    """Store SIZE outputs of every row: acc [SIZE, BM] in layout L, with its neighbours."""
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
    """Outputs row.. of a tile, its parts added in their order."""
    n = gl.expand_dims(row + gl.arange(0, SIZE, gl.SliceLayout(1, L)), 1)
    m = gl.expand_dims(gl.arange(0, BM, gl.SliceLayout(0, L)), 0)
    at = partials + tile * (SPLIT * BN * BM) + m * BN + n
    acc = gl.load(at, cache_modifier=".cg")
    for part in gl.static_range(1, SPLIT):
        acc = acc + gl.load(at + part * (BN * BM), cache_modifier=".cg")
    return acc


@gluon.jit
def _halves(acc, BN: gl.constexpr, BM: gl.constexpr, GATED: gl.constexpr, L: gl.constexpr):
    """A tile's sums [BN, BM] in layout L; with GATED those of the gate and of what it gates."""
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
def _consumer(
    ws, xs, full, empty, length, pieces, bias, residual, out, partials, counters,
    rows, outputs, residual_row,
    BM: gl.constexpr, BN: gl.constexpr, SPLIT: gl.constexpr, STAGES: gl.constexpr,
    GATED: gl.constexpr, ADD: gl.constexpr, BIAS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    ML: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BM, 16]
    )
    L: gl.constexpr = gl.BlockedLayout([4, 1], [8, 4], [1, 4], [0, 1])
    SIZE: gl.constexpr = BN // 2 if GATED else BN
    CHUNK: gl.constexpr = min(SIZE, 8192 // (BM * SPLIT))
    _wait(PDL)
    first, mine = _share(pieces)
    for at in range(mine):
        piece = first + at
        tile = piece // SPLIT
        acc = gl.zeros([BN, BM], gl.float32, ML)
        for step in range(at * length, (at + 1) * length):
            i = step % STAGES
            mbarrier.wait(full.index(i), (step // STAGES) & 1)
            product = warpgroup_mma(ws.index(i), xs.index(i).permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[product])
            mbarrier.arrive(empty.index(i), count=1)
        if SPLIT == 1:
            sums, ups = _halves(acc, BN, BM, GATED, L)
            old = _old(tile * SIZE, residual, rows, outputs, residual_row, SIZE, BM, ADD, L)
            _finish(
                sums, ups, old, tile * SIZE, bias, residual, out, rows, outputs, residual_row,
                SIZE, BM, GATED, ADD, BIAS, L,
            )  # fmt: skip
        else:
            n = gl.expand_dims(gl.arange(0, BN, gl.SliceLayout(1, L)), 1)
            m = gl.expand_dims(gl.arange(0, BM, gl.SliceLayout(0, L)), 0)
            gl.store(partials + piece * (BN * BM) + m * BN + n, gl.convert_layout(acc, L))
            gl.thread_barrier()
            if gl.atomic_add(counters + tile, 1, sem="acq_rel") == SPLIT - 1:
                gl.store(counters + tile, 0)
                for part in gl.static_range(SIZE // CHUNK):
                    row = part * CHUNK
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
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, SPLIT: gl.constexpr,
    STAGES: gl.constexpr,
    GATED: gl.constexpr, ADD: gl.constexpr, BIAS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Up to BM rows times a weight. Grid: any number of programs up to `pieces`, 4 warps.

    w_desc: [outputs, inner], boxes [BN, BK]; with GATED twice the outputs, the second half from row
    `outputs` on, and boxes [BN / 2, BK]. x_desc: [rows, inner], boxes [BM, BK]. `length` is inner /
    BK / SPLIT, `pieces` the tiles times SPLIT. residual (with ADD, stored to) [rows, outputs] with
    a row stride, out [rows, outputs] dense; partials float32 [pieces, BM, BN]; counters int32
    [tiles], zero between launches.
    """
    ws = gl.allocate_shared_memory(w_desc.dtype, [STAGES, BN, BK], w_desc.layout)
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
                rows, outputs, residual_row, BM, BN, SPLIT, STAGES, GATED, ADD, BIAS, PDL,
            )),
            (_producer, (
                w_desc, x_desc, ws, xs, full, empty, length, pieces, outputs,
                BM, BN, BK, SPLIT, STAGES, GATED, PDL,
            )),
        ],
        [1],
        [24],
    )  # fmt: skip
