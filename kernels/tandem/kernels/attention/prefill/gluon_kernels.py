"""Jit code of paged prefill attention for Hopper: a producer warp and two consumer warpgroups.

The schedule of FlashAttention-3 (Shah et al. 2024), over paged keys and planned tiles. A program
takes (tile, head) items, heaviest first, in a snake over the grid. Its producer warp gathers pages
of `BN` tokens by TMA into a ring, across items. Each consumer warpgroup has 64 query rows and
issues Q K^T of the next tile before P V of this one; the two alternate at the tensor cores.

Tiles run from the last key to the first, so that masked ones come first. With a window they end at
the first key of the item's first query, masked again.
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

from tandem.kernels.attention.gluon_kernels import blank_rows
from tandem.kernels.launch.gluon_kernels import load_box

# Arguments of each partition: qs [2, 64, D]; ks, vs [STAGES, BN, D]; q_full, q_empty [2, 1]; k_*,
# v_* [STAGES, 1]; turn [2, 1]; then the batch.


@gluon.jit
def _rounds(items):
    """Return the number of items that this program takes: one a round, in a snake over the grid."""
    grid = gl.num_programs(0)
    whole = items // grid
    return whole + (_item(whole) < items).to(gl.int32)


@gluon.jit
def _item(turn):
    """Return the item of this program in round `turn`."""
    me = gl.program_id(0)
    grid = gl.num_programs(0)
    return turn * grid + gl.where(turn % 2 == 0, me, grid - 1 - me)


@gluon.jit
def _lowest(position, WINDOW: gl.constexpr):
    """Return the first key that a query at `position` attends to."""
    return gl.maximum(position - WINDOW + 1, 0) if WINDOW else 0


@gluon.jit
def _producer(
    q_desc, kv_desc, tables, plan, items, table_row, block_rows, two_rows, head_rows,
    qs, ks, vs, q_full, q_empty, k_full, k_empty, v_full, v_empty,
    HEADS: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr,
    BN: gl.constexpr, WINDOW: gl.constexpr, STAGES: gl.constexpr, FIELDS: gl.constexpr,
):  # fmt: skip
    PAGES: gl.constexpr = BN // PAGE
    BYTES: gl.constexpr = BN * D * 2
    step = 0
    for turn in range(_rounds(items)):
        item = _item(turn)
        row = plan + (item // HEADS) * FIELDS
        head = item % HEADS
        q_row = gl.load(row)
        kv_end = gl.load(row + 3)
        length = gl.load(row + 4)
        table = tables + gl.load(row + 5).to(gl.int64) * table_row
        last_page = gl.cdiv(length, PAGE) - 1
        tiles = gl.cdiv(kv_end, BN)
        lowest = _lowest(gl.load(row + 2), WINDOW)
        head_row = (head // GROUP) * head_rows
        for t in range(tiles - lowest // BN):
            first = (tiles - 1 - t) * PAGES
            i = step % STAGES
            phase = ((step // STAGES) & 1) ^ 1
            step += 1
            pages = ()  # read before the ring is waited for, to hide the latency
            for h in gl.static_range(PAGES):
                page = gl.minimum(first + h, last_page)  # past the last: masked
                if WINDOW:
                    page = gl.maximum(page, lowest // PAGE)  # before the window: masked
                block = gl.load(table + page)
                pages = pages + (block * block_rows + head_row,)  # type: ignore[assignment]  # noqa: RUF005
            mbarrier.wait(k_empty.index(i), phase)
            mbarrier.expect(k_full.index(i), BYTES)
            for h in gl.static_range(PAGES):
                load_box(
                    kv_desc,
                    [pages[h], 0],
                    k_full.index(i),
                    ks.index(i).slice(h * PAGE, PAGE, dim=0),
                )
            if t == 0:
                for w in gl.static_range(2):
                    mbarrier.wait(q_empty.index(w), (turn & 1) ^ 1)
                    mbarrier.expect(q_full.index(w), 64 * D * 2)
                    load_box(q_desc, [q_row + w * 64, head * D], q_full.index(w), qs.index(w))
            mbarrier.wait(v_empty.index(i), phase)
            mbarrier.expect(v_full.index(i), BYTES)
            for h in gl.static_range(PAGES):
                load_box(
                    kv_desc,
                    [pages[h] + two_rows, 0],
                    v_full.index(i),
                    vs.index(i).slice(h * PAGE, PAGE, dim=0),
                )


@gluon.jit
def _softmax(
    s, top, total, scale, key0, pos0,
    MASK: gl.constexpr, BN: gl.constexpr, WINDOW: gl.constexpr, SL: gl.constexpr,
):  # fmt: skip
    """Take one step of the online softmax: p (unnormalised), new top and total, factor for the
    old."""
    if MASK:
        pos = pos0 - key0 + gl.arange(0, 64, gl.SliceLayout(1, SL))
        # Opaque, so that 64 comparisons are not made before the product and kept as packed bits.
        pos = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [pos], gl.int32, False, 1)
        key = gl.arange(0, BN, gl.SliceLayout(0, SL))
        visible = gl.expand_dims(pos, 1) >= gl.expand_dims(key, 0)
        if WINDOW:
            visible = visible & (gl.expand_dims(pos - WINDOW, 1) < gl.expand_dims(key, 0))
        s = gl.where(visible, s, -1e30)
    new = gl.maximum(top, gl.max(s, 1))
    shift = new * scale
    if MASK:  # a row without keys so far: p stays zero, whatever -1e30 * scale rounds to
        shift = gl.where(new < -1e29, 0.0, shift)
    p = gl.exp2(s * scale - gl.expand_dims(shift, 1))
    old = gl.exp2(top * scale - shift)
    return p, new, total * old + gl.sum(p, 1), old


@gluon.jit
def _take_turn(turn, step, W: gl.constexpr, PINGPONG: gl.constexpr):
    if PINGPONG:
        mbarrier.wait(turn.index(W), (step & 1) ^ (1 - W))


@gluon.jit
def _pass_turn(turn, W: gl.constexpr, PINGPONG: gl.constexpr):
    if PINGPONG:
        mbarrier.arrive(turn.index(1 - W), count=1)


@gluon.jit
def _step(
    step, key0, q, ks, vs, k_full, k_empty, v_full, v_empty, turn, p, o, top, total, scale, pos0,
    W: gl.constexpr, MASK: gl.constexpr, BN: gl.constexpr, WINDOW: gl.constexpr,
    STAGES: gl.constexpr, PINGPONG: gl.constexpr, SL: gl.constexpr, OL: gl.constexpr,
):  # fmt: skip
    """Issue Q K^T of this tile and P V of the one before, then the softmax.

    p is passed in float32, to avoid unpacking.
    """
    i = step % STAGES
    ip = (step - 1) % STAGES
    mbarrier.wait(k_full.index(i), (step // STAGES) & 1)
    _take_turn(turn, step, W, PINGPONG)
    s_wait = warpgroup_mma(
        q,
        ks.index(i).permute((1, 0)),
        gl.zeros([64, BN], gl.float32, SL),
        use_acc=False,
        is_async=True,
    )
    p = gl.convert_layout(p.to(ks.dtype), gl.DotOperandLayout(0, OL, 2))
    mbarrier.wait(v_full.index(ip), ((step - 1) // STAGES) & 1)
    o_wait = warpgroup_mma(p, vs.index(ip), o, is_async=True)
    _pass_turn(turn, W, PINGPONG)
    s = warpgroup_mma_wait(1, deps=[s_wait])
    mbarrier.arrive(k_empty.index(i), count=1)
    p, top, total, old = _softmax(s, top, total, scale, key0, pos0, MASK, BN, WINDOW, SL)
    # Already passed: the branch keeps ptxas from moving the wait for P V before the softmax.
    mbarrier.wait(v_full.index(ip), ((step - 1) // STAGES) & 1)
    o = warpgroup_mma_wait(0, deps=[o_wait])
    mbarrier.arrive(v_empty.index(ip), count=1)
    o = o * gl.expand_dims(gl.convert_layout(old, gl.SliceLayout(1, OL)), 1)
    return p, o, top, total


@gluon.jit
def _consumer(  # noqa: PLR0915 - a partition is one function
    W: gl.constexpr, out, plan, items, scale,
    qs, ks, vs, q_full, q_empty, k_full, k_empty, v_full, v_empty, turn,
    HEADS: gl.constexpr, D: gl.constexpr, BN: gl.constexpr, WINDOW: gl.constexpr,
    STAGES: gl.constexpr, FIELDS: gl.constexpr, PINGPONG: gl.constexpr,
):  # fmt: skip
    SL: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16]
    )
    OL: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16]
    )
    q = qs.index(W)
    step = 0
    for round_ in range(_rounds(items)):
        item = _item(round_)
        row = plan + (item // HEADS) * FIELDS
        head = item % HEADS
        q_row = gl.load(row)
        rows = gl.load(row + 1)
        pos0 = gl.load(row + 2) + W * 64
        kv_end = gl.load(row + 3)
        length = gl.load(row + 4)
        tiles = gl.cdiv(kv_end, BN)
        lowest = _lowest(gl.load(row + 2), WINDOW)
        count = tiles - lowest // BN
        masked = gl.maximum(tiles - (pos0 + 1) // BN, 1)
        whole = count  # end of the tiles without a mask
        if WINDOW:
            # 63 rows on is the last query of this warpgroup; all its tiles before are masked.
            whole = gl.minimum(tiles - gl.cdiv(_lowest(pos0 + 63, WINDOW), BN), count)
        top = gl.full([64], -1e30, gl.float32, gl.SliceLayout(1, SL))
        total = gl.zeros([64], gl.float32, gl.SliceLayout(1, SL))
        o = gl.zeros([64, D], gl.float32, OL)
        i = step % STAGES
        mbarrier.wait(q_full.index(W), round_ & 1)
        mbarrier.wait(k_full.index(i), (step // STAGES) & 1)
        _take_turn(turn, step, W, PINGPONG)
        s_wait = warpgroup_mma(
            q,
            ks.index(i).permute((1, 0)),
            gl.zeros([64, BN], gl.float32, SL),
            use_acc=False,
            is_async=True,
        )
        _pass_turn(turn, W, PINGPONG)
        s = warpgroup_mma_wait(0, deps=[s_wait])
        mbarrier.arrive(k_empty.index(i), count=1)
        key0 = (tiles - 1) * BN
        p, top, total, _ = _softmax(s, top, total, scale, key0, pos0, True, BN, WINDOW, SL)
        if tiles * BN > length:
            mbarrier.wait(v_full.index(i), (step // STAGES) & 1)
            blank_rows(vs.index(i), length - key0, BN, D, BN)
        for t in range(1, gl.minimum(masked, count)):
            p, o, top, total = _step(
                step + t, (tiles - 1 - t) * BN, q, ks, vs, k_full, k_empty, v_full, v_empty, turn,
                p, o, top, total, scale, pos0, W, True, BN, WINDOW, STAGES, PINGPONG, SL, OL,
            )  # fmt: skip
        for t in range(masked, whole):
            p, o, top, total = _step(
                step + t, (tiles - 1 - t) * BN, q, ks, vs, k_full, k_empty, v_full, v_empty, turn,
                p, o, top, total, scale, pos0, W, False, BN, WINDOW, STAGES, PINGPONG, SL, OL,
            )  # fmt: skip
        if WINDOW:
            for t in range(gl.maximum(masked, whole), count):
                p, o, top, total = _step(
                    step + t, (tiles - 1 - t) * BN, q, ks, vs, k_full, k_empty, v_full, v_empty,
                    turn, p, o, top, total, scale, pos0, W, True, BN, WINDOW, STAGES, PINGPONG, SL,
                    OL,
                )  # fmt: skip
        mbarrier.arrive(q_empty.index(W), count=1)
        step += count
        i = (step - 1) % STAGES
        mbarrier.wait(v_full.index(i), ((step - 1) // STAGES) & 1)
        if WINDOW:  # noqa: SIM102 - this one is a constant, the other is not
            if lowest % BN > 0:  # another page was copied to the place of those before the window
                blank_rows(vs.index(i), 0, lowest % BN, D, BN)
        p16 = gl.convert_layout(p.to(ks.dtype), gl.DotOperandLayout(0, OL, 2))
        o = warpgroup_mma(p16, vs.index(i), o, is_async=True)
        o = warpgroup_mma_wait(0, deps=[o])
        mbarrier.arrive(v_empty.index(i), count=1)
        o = o * gl.expand_dims(gl.convert_layout(1.0 / total, gl.SliceLayout(1, OL)), 1)
        r = W * 64 + gl.arange(0, 64, gl.SliceLayout(1, OL))
        c = gl.arange(0, D, gl.SliceLayout(0, OL))
        at = ((q_row + r).to(gl.int64) * HEADS + head) * D
        gl.store(
            out + gl.expand_dims(at, 1) + gl.expand_dims(c, 0),
            o.to(ks.dtype),
            mask=gl.expand_dims(r < rows, 1),
        )


@gluon.jit
def _consumer0(
    out, plan, items, scale,
    qs, ks, vs, q_full, q_empty, k_full, k_empty, v_full, v_empty, turn,
    HEADS: gl.constexpr, D: gl.constexpr, BN: gl.constexpr, WINDOW: gl.constexpr,
    STAGES: gl.constexpr, FIELDS: gl.constexpr, PINGPONG: gl.constexpr,
):  # fmt: skip
    _consumer(
        0, out, plan, items, scale,
        qs, ks, vs, q_full, q_empty, k_full, k_empty, v_full, v_empty, turn,
        HEADS, D, BN, WINDOW, STAGES, FIELDS, PINGPONG,
    )  # fmt: skip


@gluon.jit
def _consumer1(
    out, plan, items, scale,
    qs, ks, vs, q_full, q_empty, k_full, k_empty, v_full, v_empty, turn,
    HEADS: gl.constexpr, D: gl.constexpr, BN: gl.constexpr, WINDOW: gl.constexpr,
    STAGES: gl.constexpr, FIELDS: gl.constexpr, PINGPONG: gl.constexpr,
):  # fmt: skip
    _consumer(
        1, out, plan, items, scale,
        qs, ks, vs, q_full, q_empty, k_full, k_empty, v_full, v_empty, turn,
        HEADS, D, BN, WINDOW, STAGES, FIELDS, PINGPONG,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["tables", "table_row"])
def prefill_tiles(
    q_desc, kv_desc, tables, plan, count, out, table_row, block_rows, two_rows, head_rows, scale,
    HEADS: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr,
    BN: gl.constexpr, WINDOW: gl.constexpr, STAGES: gl.constexpr, FIELDS: gl.constexpr,
    PINGPONG: gl.constexpr, CONSUMER_REGS: gl.constexpr, PRODUCER_REGS: gl.constexpr,
):  # fmt: skip
    """Attend the planned tiles, 128 query rows each. Grid: (programs that fit,), 4 warps.

    q_desc: [tokens, HEADS * D], boxes [64, D]. kv_desc: rows of D, boxes [PAGE, D]; the first row
    of (block, K|V, KV head) is block * block_rows + K|V * two_rows + KV head * head_rows. plan:
    int32 [tiles, FIELDS] by plan_tiles, of which count[0] are real. out: [tokens, HEADS, D], dense.
    scale carries log2(e). WINDOW is 0 if there is none.
    """
    items = gl.load(count) * HEADS
    qs = gl.allocate_shared_memory(q_desc.dtype, [2, 64, D], q_desc.layout)
    ks = gl.allocate_shared_memory(kv_desc.dtype, [STAGES, BN, D], kv_desc.layout)
    vs = gl.allocate_shared_memory(kv_desc.dtype, [STAGES, BN, D], kv_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for w in gl.static_range(2):
        mbarrier.init(q_full.index(w), count=1)
        mbarrier.init(q_empty.index(w), count=1)
        mbarrier.init(turn.index(w), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_empty.index(i), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consumer0, (
                out, plan, items, scale,
                qs, ks, vs, q_full, q_empty, k_full, k_empty, v_full, v_empty, turn,
                HEADS, D, BN, WINDOW, STAGES, FIELDS, PINGPONG,
            )),
            (_consumer1, (
                out, plan, items, scale,
                qs, ks, vs, q_full, q_empty, k_full, k_empty, v_full, v_empty, turn,
                HEADS, D, BN, WINDOW, STAGES, FIELDS, PINGPONG,
            )),
            (_producer, (
                q_desc, kv_desc, tables, plan, items, table_row, block_rows, two_rows, head_rows,
                qs, ks, vs, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                HEADS, GROUP, D, PAGE, BN, WINDOW, STAGES, FIELDS,
            )),
        ],
        [4, 1],
        [CONSUMER_REGS, PRODUCER_REGS],
    )  # fmt: skip
