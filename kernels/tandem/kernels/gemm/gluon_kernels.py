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

from tandem.kernels.gemm.stream_kernels import first_inner, next_step, share_of, store_sums
from tandem.kernels.launch.gluon_kernels import load_box, release, wait

LEAST_SCALES = gl.constexpr(32)
"""Fewest scales that are copied at once, as the copy engine writes to multiples of 128 bytes."""


@gluon.jit
def copy_weights(
    w_desc, to, full, row, k, half,
    BN: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """Copy a tile's weights from `row` and input k on; with GATED half of them, and those `half`
    rows after them."""
    if GATED:
        for part in gl.static_range(2):
            there = to.slice(part * (BN // 2), BN // 2, dim=0)
            load_box(w_desc, [row + part * half, k], full, there)
    else:
        load_box(w_desc, [row, k], full, to)


@gluon.jit
def _copy_group(
    w_desc, ws, full, i, group, k, half,
    BN: gl.constexpr, GROUP: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    SIZE: gl.constexpr = BN // 2 if GATED else BN
    for g in gl.static_range(GROUP):
        row = (group * GROUP + g) * SIZE
        copy_weights(w_desc, ws.index(i * GROUP + g), full.index(i), row, k, half, BN, GATED)


@gluon.jit
def _by_channel(
    sums, x_scale, w_scale, group, rows, outputs,
    BM: gl.constexpr, BN: gl.constexpr, GATED: gl.constexpr, ML: gl.constexpr,
):  # fmt: skip
    """Return the sums of a tile times the scales of its outputs and rows."""
    SIZE: gl.constexpr = BN // 2 if GATED else BN
    n = gl.arange(0, BN, gl.SliceLayout(1, ML))
    m = gl.arange(0, BM, gl.SliceLayout(0, ML))
    of_w = gl.load(w_scale + group * SIZE + n + (n >= SIZE) * (outputs - SIZE))
    of_x = gl.load(x_scale + m, mask=m < rows, other=0.0)
    return sums * gl.expand_dims(of_w, 1) * gl.expand_dims(of_x, 0)


@gluon.jit
def copy_rows(x_desc, scale_desc, xs, scales, full, i, row, k, BLOCK: gl.constexpr):
    """Copy rows of x from `row` and input k on to stage i, and with BLOCK their scales."""
    load_box(x_desc, [row, k], full.index(i), xs.index(i))
    if BLOCK:
        load_box(scale_desc, [k // BLOCK, row], full.index(i), scales.index(i))


@gluon.jit
def _producer(
    w_desc, x_desc, scale_desc, ws, xs, scales, full, empty, length, pieces, half,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr,
    SPLIT: gl.constexpr, STAGES: gl.constexpr, BLOCK: gl.constexpr, GATED: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    NUMBERS: gl.constexpr = (GROUP * BN + BM) * BK
    SCALES: gl.constexpr = BK // BLOCK * max(BM, LEAST_SCALES) * 4 if BLOCK else 0
    BYTES: gl.constexpr = NUMBERS * w_desc.dtype.primitive_bitwidth // 8 + SCALES
    first, mine = share_of(pieces)
    count = mine * length
    ring = gl.minimum(count, STAGES)
    piece, at = first, 0
    for s in range(ring):
        k = first_inner(piece, at, length, BK, SPLIT)
        mbarrier.expect(full.index(s), BYTES)
        _copy_group(w_desc, ws, full, s, piece // SPLIT, k, half, BN, GROUP, GATED)
        piece, at = next_step(piece, at, length)
    wait(PDL)
    release(PDL)
    piece, at = first, 0
    for s in range(ring):
        k = first_inner(piece, at, length, BK, SPLIT)
        copy_rows(x_desc, scale_desc, xs, scales, full, s, 0, k, BLOCK)
        piece, at = next_step(piece, at, length)
    for s in range(ring, count):
        k = first_inner(piece, at, length, BK, SPLIT)
        i = s % STAGES
        mbarrier.wait(empty.index(i), ((s // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(i), BYTES)
        _copy_group(w_desc, ws, full, i, piece // SPLIT, k, half, BN, GROUP, GATED)
        copy_rows(x_desc, scale_desc, xs, scales, full, i, 0, k, BLOCK)
        piece, at = next_step(piece, at, length)


@gluon.jit
def multiply(
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
def multiply_blocks(
    ws, xs, scales, full, empty, begin, length, w_scale, up_scale,
    BM: gl.constexpr, BN: gl.constexpr, BLOCKS: gl.constexpr, BLOCK: gl.constexpr,
    CHANNEL: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr, ML: gl.constexpr,
):  # fmt: skip
    """Return sums of one tile over `length` steps from `begin` on, each of BLOCKS blocks of inputs.

    A block's product is multiplied by the scales of x and of the weight, with GATED by those of
    both halves. With CHANNEL it is only added to the sums.
    """
    zeros = gl.zeros([BN, BM], gl.float32, ML)
    sums = zeros
    is_gate = gl.expand_dims(gl.arange(0, BN, gl.SliceLayout(1, ML)), 1) < BN // 2
    # The weight's scales are read two steps ahead, which hides the latency of memory.
    of_w = _scales_at(w_scale, 0, length, BLOCKS, CHANNEL)
    of_next = _scales_at(w_scale, 1, length, BLOCKS, CHANNEL)
    of_up = _scales_at(up_scale, 0, length, BLOCKS, CHANNEL)
    up_next = _scales_at(up_scale, 1, length, BLOCKS, CHANNEL)
    for step in range(length):
        i = (begin + step) % STAGES
        mbarrier.wait(full.index(i), ((begin + step) // STAGES) & 1)
        products = ()
        for b in gl.static_range(BLOCKS):
            w = ws.index(i).slice(b * BLOCK, BLOCK, dim=1)
            x = xs.index(i).slice(b * BLOCK, BLOCK, dim=1).permute((1, 0))
            product = warpgroup_mma(w, x, zeros, use_acc=False, is_async=True)
            products = products + (product,)  # type: ignore[assignment]  # noqa: RUF005
        factors = ()
        for b in gl.static_range(BLOCKS):
            factor = zeros
            if not CHANNEL:
                factor = scales.index(i).slice(b, 1, dim=0).slice(0, BM, dim=1).load(ML)
                factor = factor * (gl.where(is_gate, of_w[b], of_up[b]) if GATED else of_w[b])
            factors = factors + (factor,)  # type: ignore[assignment]  # noqa: RUF005
        of_w = of_next
        of_next = _scales_at(w_scale, step + 2, length, BLOCKS, CHANNEL)
        if GATED:
            of_up = up_next
            up_next = _scales_at(up_scale, step + 2, length, BLOCKS, CHANNEL)
        for b in gl.static_range(BLOCKS):
            product = warpgroup_mma_wait(BLOCKS - 1 - b, deps=(products[b],))
            if b == BLOCKS - 1:
                mbarrier.arrive(empty.index(i), count=1)
            sums += product if CHANNEL else product * factors[b]
    return sums


@gluon.jit
def _scales_at(scale, step, length, BLOCKS: gl.constexpr, CHANNEL: gl.constexpr):
    """Return the scales of a step's blocks; with CHANNEL they are not read."""
    found = ()
    for b in gl.static_range(BLOCKS):
        value = 1.0
        if not CHANNEL:
            value = gl.load(scale + step * BLOCKS + b, mask=step < length, other=0.0)
        found = found + (value,)  # type: ignore[assignment]  # noqa: RUF005
    return found


@gluon.jit
def _consumer(
    ws, xs, scales, full, empty, length, pieces, bias, residual, out, partials, counters,
    x_scale, w_scale, w_block, rows, outputs, residual_row,
    BM: gl.constexpr, BN: gl.constexpr, GROUP: gl.constexpr, SPLIT: gl.constexpr,
    STAGES: gl.constexpr, BLOCKS: gl.constexpr, BLOCK: gl.constexpr, CHANNEL: gl.constexpr,
    GATED: gl.constexpr, ADD: gl.constexpr, BIAS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    ML: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BM, 32 if BLOCK else 16]
    )
    SIZE: gl.constexpr = BN // 2 if GATED else BN
    wait(PDL)
    first, mine = share_of(pieces)
    for at in range(mine):
        piece = first + at
        group = piece // SPLIT
        if BLOCK:
            block = piece % SPLIT * length * BLOCKS
            of_w = w_scale + group * SIZE // BLOCK * w_block + block
            of_up = w_scale + (outputs + group * SIZE) // BLOCK * w_block + block
            total = multiply_blocks(
                ws, xs, scales, full, empty, at * length, length, of_w, of_up if GATED else of_w,
                BM, BN, BLOCKS, BLOCK, CHANNEL, STAGES, GATED, ML,
            )  # fmt: skip
            if CHANNEL:
                total = _by_channel(
                    total, x_scale, w_scale, group, rows, outputs, BM, BN, GATED, ML
                )
            sums = (total,)
        else:
            sums = multiply(
                ws, xs, full, empty, at * length, (at + 1) * length, BM, BN, GROUP, STAGES, ML
            )
        store_sums(
            sums, piece, bias, residual, out, partials, counters, rows, outputs, residual_row,
            BM, BN, GROUP, SPLIT, GATED, ADD, BIAS,
        )  # fmt: skip


@gluon.jit(do_not_specialize=["rows", "length", "pieces", "w_block"])
def multiply_stream(
    w_desc, x_desc, scale_desc, bias, residual, out, partials, counters, x_scale, w_scale,
    rows, outputs, residual_row, length, pieces, w_block,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr,
    SPLIT: gl.constexpr, STAGES: gl.constexpr, BLOCK: gl.constexpr, CHANNEL: gl.constexpr,
    GATED: gl.constexpr, ADD: gl.constexpr, BIAS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Multiply up to BM rows with a weight. Grid: at most `pieces` programs, 4 warps.

    w_desc: [outputs, inner], boxes [BN, BK]; with GATED twice the outputs, the second half from row
    `outputs` on, and boxes [BN / 2, BK]. x_desc: [rows, inner], boxes [BM, BK]. `length` is inner /
    BK / SPLIT, `pieces` the groups times SPLIT. residual (with ADD, stored to) [rows, outputs] with
    a row stride, out [rows, outputs] dense; partials float32 [pieces * GROUP, BM, BN]; counters
    int32 [groups], zero between launches.

    Both may be e4m3. x has then a scale for each BLOCK of inputs and row, float32 [blocks, rows],
    boxes [BK / BLOCK, at least BM], and the weight one for each BLOCK by BLOCK; GROUP is 1.
    With CHANNEL there are x_scale [rows] and w_scale [outputs] instead. Otherwise BLOCK is 0, and
    scales are not read.
    """
    ws = gl.allocate_shared_memory(w_desc.dtype, [STAGES * GROUP, BN, BK], w_desc.layout)
    xs = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BM, BK], x_desc.layout)
    BLOCKS: gl.constexpr = BK // BLOCK if BLOCK else 0
    scales = xs
    if BLOCK and not CHANNEL:
        scales = gl.allocate_shared_memory(
            gl.float32, [STAGES, BLOCKS, max(BM, LEAST_SCALES)], scale_desc.layout
        )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consumer, (
                ws, xs, scales, full, empty, length, pieces, bias, residual, out, partials,
                counters, x_scale, w_scale, w_block, rows, outputs, residual_row,
                BM, BN, GROUP, SPLIT, STAGES, BLOCKS, BLOCK, CHANNEL, GATED, ADD, BIAS, PDL,
            )),
            (_producer, (
                w_desc, x_desc, scale_desc, ws, xs, scales, full, empty, length, pieces, outputs,
                BM, BN, BK, GROUP, SPLIT, STAGES, 0 if CHANNEL else BLOCK, GATED, PDL,
            )),
        ],
        [1],
        [24],
    )  # fmt: skip
