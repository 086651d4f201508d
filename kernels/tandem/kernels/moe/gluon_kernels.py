"""Jit code of experts for few tokens on Hopper: the weights of the chosen experts stream once.

All tokens are multiplied with each chosen expert, as reading its weights takes longer, and the rows
of other tokens are not stored. Chosen experts are in a list on the device (plan_kernels.py), so a
program takes its share of (expert, tile of outputs) without knowing their number before.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from tandem.kernels.gemm.gluon_kernels import (
    LEAST_SCALES,
    copy_rows,
    copy_weights,
    multiply,
    multiply_blocks,
)
from tandem.kernels.gemm.stream_kernels import halves_of, share_of
from tandem.kernels.launch.gluon_kernels import release, wait


@gluon.jit
def _producer(
    w_desc, x_desc, scale_desc, ws, xs, scales, full, empty, chosen, tiles, length, half,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
    BLOCK: gl.constexpr, GATED: gl.constexpr, DOWN: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    NUMBERS: gl.constexpr = (BN + BM) * BK
    SCALES: gl.constexpr = BK // BLOCK * max(BM, LEAST_SCALES) * 4 if BLOCK else 0
    BYTES: gl.constexpr = NUMBERS * w_desc.dtype.primitive_bitwidth // 8 + SCALES
    wait(PDL)
    release(PDL)
    first, mine = share_of(gl.load(chosen) * tiles)
    step = 0
    for at in range(mine):
        piece = first + at
        place = piece // tiles
        row = gl.load(chosen + 1 + place) * tiles * BN + piece % tiles * (BN // 2 if GATED else BN)
        x_row = place * BM if DOWN else 0
        for k in range(length):
            i = step % STAGES
            mbarrier.wait(empty.index(i), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(i), BYTES)
            copy_weights(w_desc, ws.index(i), full.index(i), row, k * BK, half, BN, GATED)
            copy_rows(x_desc, scale_desc, xs, scales, full, i, x_row, k * BK, BLOCK)
            step += 1


@gluon.jit
def _activated(gate, up, ACTIVATION: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr):
    """Return the activation by its name in ``ExpertActivation``."""
    if ACTIVATION == "relu2":
        found = gl.maximum(gate, 0.0)
        return found * found
    if ACTIVATION == "silu":
        return gate / (1.0 + gl.exp(-gate)) * up
    gate = gl.minimum(gate, LIMIT)
    up = gl.minimum(gl.maximum(up, -LIMIT), LIMIT)
    return (up + 1.0) * (gate / (1.0 + gl.exp(gate * -ALPHA)))


@gluon.jit
def _consumer(
    ws, xs, scales, full, empty, chosen, slots, factors, tiles, length, half, w_scale, w_block,
    bias, out, rows, outputs, num_chosen,
    BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, BLOCKS: gl.constexpr,
    BLOCK: gl.constexpr, ACTIVATION: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr,
    GATED: gl.constexpr, DOWN: gl.constexpr, BIAS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    ML: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BM, 32 if BLOCK else 16]
    )
    L: gl.constexpr = gl.BlockedLayout([4, 1], [8, 4], [1, 4], [0, 1])
    SIZE: gl.constexpr = BN // 2 if GATED else BN
    wait(PDL)
    first, mine = share_of(gl.load(chosen) * tiles)
    n = gl.expand_dims(gl.arange(0, SIZE, gl.SliceLayout(1, L)), 1)
    m = gl.arange(0, BM, gl.SliceLayout(0, L))
    for at in range(mine):
        piece = first + at
        place, tile = piece // tiles, piece % tiles
        expert = gl.load(chosen + 1 + place)
        row = expert * tiles * BN + tile * SIZE
        if BLOCK:
            # Gate and up have their own blocks, the last ones cut short.
            deep = (half + BLOCK - 1) // BLOCK
            blocks = 2 * deep if GATED else (tiles * BN + BLOCK - 1) // BLOCK
            of_w = w_scale + (expert * blocks + tile * SIZE // BLOCK) * w_block
            of_up = of_w + deep * w_block if GATED else of_w
            sums = multiply_blocks(
                ws, xs, scales, full, empty, at * length, length, of_w, of_up,
                BM, BN, BLOCKS, BLOCK, False, STAGES, GATED, ML,
            )  # fmt: skip
        else:
            sums = multiply(
                ws, xs, full, empty, at * length, (at + 1) * length, BM, BN, 1, STAGES, ML
            )[0]
        value, up = halves_of(sums, BN, BM, GATED, L)
        if BIAS:
            value += gl.load(bias + row + n).to(gl.float32)
            if GATED:
                up += gl.load(bias + row + half + n).to(gl.float32)
        if DOWN:
            slot = gl.load(slots + place * BM + m)
            routed = (m < rows) & (slot >= 0)
            factor = gl.load(factors + m * num_chosen + slot, mask=routed, other=0.0)
            value *= gl.expand_dims(factor, 0)
            to = (m * num_chosen + slot).to(gl.int64) * outputs
            keep = gl.expand_dims(routed, 0)
        else:
            value = _activated(value, up, ACTIVATION, ALPHA, LIMIT)
            to = (place * BM + m).to(gl.int64) * outputs
            keep = gl.expand_dims(m < rows, 0)
        at_out = out + gl.expand_dims(to, 0) + tile * SIZE + n
        gl.store(at_out, value.to(out.dtype.element_ty), mask=keep & (tile * SIZE + n < outputs))


@gluon.jit(do_not_specialize=["rows", "w_block"])
def multiply_experts(
    w_desc, x_desc, scale_desc, chosen, slots, factors, w_scale, bias, out,
    rows, outputs, num_chosen, tiles, length, half, w_block,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
    BLOCK: gl.constexpr, ACTIVATION: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr,
    GATED: gl.constexpr, DOWN: gl.constexpr, BIAS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Multiply up to BM rows with each chosen expert. Grid: programs, 4 warps.

    w_desc: [experts * tiles * BN, inner], boxes [BN, BK]; with GATED the second half of an expert
    begins `half` rows after its first, boxes [BN / 2, BK]. chosen: int32, the number of chosen
    experts and then their ids. Boxes of x are [BM, BK]; `length` is inner / BK, rounded up.

    Without DOWN x_desc is [rows, inner] and out [chosen * BM, outputs], activated. With DOWN x_desc
    is that, and out float32 [rows * num_chosen, outputs] gets the rows whose slots int32 [chosen,
    BM] are not negative, times factors float32 [rows, num_chosen].

    Weights and x may be e4m3, with scales as in ``multiply_stream``; w_scale [experts, blocks,
    w_block].
    """
    ws = gl.allocate_shared_memory(w_desc.dtype, [STAGES, BN, BK], w_desc.layout)
    xs = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BM, BK], x_desc.layout)
    BLOCKS: gl.constexpr = BK // BLOCK if BLOCK else 0
    scales = xs
    if BLOCK:
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
                ws, xs, scales, full, empty, chosen, slots, factors, tiles, length, half, w_scale,
                w_block, bias, out, rows, outputs, num_chosen,
                BM, BN, STAGES, BLOCKS, BLOCK, ACTIVATION, ALPHA, LIMIT, GATED, DOWN, BIAS, PDL,
            )),
            (_producer, (
                w_desc, x_desc, scale_desc, ws, xs, scales, full, empty, chosen, tiles, length,
                half, BM, BN, BK, STAGES, BLOCK, GATED, DOWN, PDL,
            )),
        ],
        [1],
        [24],
    )  # fmt: skip
