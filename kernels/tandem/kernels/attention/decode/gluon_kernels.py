"""Jit code of paged decode attention for Hopper: a producer warp and a warpgroup that multiplies.

A program computes one share of the planned line of units (plan_kernels.py). Its producer warp
copies tiles of K and V by TMA into a ring, ahead of the sums and across (sequence, head) pairs.
Before the kernel ahead has ended, it only copies tiles without tokens of this call.

As query rows are few, the keys and then the head's dimensions are the long side of the matrix
instruction: S^T = K Q^T [TILE, N] and O^T += V^T P^T [D, N], where N, at least 8, holds the rows.

Both are read from shared memory by the tensor cores. Tiles of codes are first read to registers,
where they are converted to the type of q, exactly.
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
from tandem.kernels.launch.gluon_kernels import (
    barrier,
    load_box,
    release,
    wait,
)


@gluon.jit
def leave_piece(
    pieces, stats, slot, acc, top, total,
    KEPT: gl.constexpr, N: gl.constexpr, D: gl.constexpr, L: gl.constexpr,
):  # fmt: skip
    """Store the columns as rows of a workspace slot, with their maxima and sums."""
    n = gl.arange(0, N, gl.SliceLayout(0, L))
    d = gl.expand_dims(gl.arange(0, D, gl.SliceLayout(1, L)), 1)
    at = slot * KEPT + n
    gl.store(pieces + gl.expand_dims(at, 0) * D + d, acc, mask=gl.expand_dims(n < KEPT, 0))
    gl.store(stats + at * 2, top, mask=n < KEPT)
    gl.store(stats + at * 2 + 1, total, mask=n < KEPT)


@gluon.jit
def merge_pieces(
    pieces, stats, head_first, first, last, share,
    KEPT: gl.constexpr, N: gl.constexpr, D: gl.constexpr, WIDE: gl.constexpr, L: gl.constexpr,
):  # fmt: skip
    """Sum the pieces of shares first..last: [D, N] in layout L, and the sums of its columns.

    WIDE pieces are loaded at a time: one latency of L2 for each WIDE.
    """
    n = gl.arange(0, N, gl.SliceLayout(0, L))
    d = gl.expand_dims(gl.arange(0, D, gl.SliceLayout(1, L)), 1)
    # The first share of a pair has its piece in slot 1, unless the pair begins with the share.
    first_slot = first * 2 + (head_first > first * share).to(gl.int32)
    top = gl.full([N], -1e30, gl.float32, gl.SliceLayout(0, L))
    total = gl.zeros([N], gl.float32, gl.SliceLayout(0, L))
    acc = gl.zeros([D, N], gl.float32, L)
    for start in range(first, last + 1, WIDE):
        maxima = ()
        sums = ()
        parts = ()
        for i in gl.static_range(WIDE):
            which = start + i
            keep = (n < KEPT) & (which <= last)
            at = gl.where(which == first, first_slot, which * 2) * KEPT + n
            part = gl.load(
                pieces + gl.expand_dims(at, 0) * D + d,
                mask=gl.expand_dims(keep, 0),
                other=0.0,
                cache_modifier=".cg",
            )
            m = gl.load(stats + at * 2, mask=keep, other=-1e30, cache_modifier=".cg")
            s = gl.load(stats + at * 2 + 1, mask=keep, other=0.0, cache_modifier=".cg")
            maxima = maxima + (m,)  # type: ignore[assignment]  # noqa: RUF005
            sums = sums + (s,)  # type: ignore[assignment]  # noqa: RUF005
            parts = parts + (part,)  # type: ignore[assignment]  # noqa: RUF005
        new = top
        for i in gl.static_range(WIDE):
            new = gl.maximum(new, maxima[i])
        old = gl.exp2(top - new)
        total = total * old
        acc = acc * gl.expand_dims(old, 0)
        for i in gl.static_range(WIDE):
            weight = gl.exp2(maxima[i] - new)
            total += sums[i] * weight
            acc += parts[i] * gl.expand_dims(weight, 0)
        top = new
    return acc, total


@gluon.jit
def write(
    out, acc, total, q_first, q_len, head, kv_scales,
    GROUP: gl.constexpr, HEADS: gl.constexpr, N: gl.constexpr, D: gl.constexpr,
    L: gl.constexpr, CODES: gl.constexpr,
):  # fmt: skip
    """Normalise [D, N] and store its columns as rows; a row over no key is zero. Those of CODES are
    multiplied by V's scale of the head."""
    n = gl.arange(0, N, gl.SliceLayout(0, L))
    d = gl.expand_dims(gl.arange(0, D, gl.SliceLayout(1, L)), 1)
    keep = n // GROUP < q_len
    row = (q_first + n // GROUP).to(gl.int64) * HEADS + head * GROUP + n % GROUP
    safe = gl.where(total > 0.0, total, 1.0)
    rows = acc / gl.expand_dims(safe, 0)
    if CODES:
        rows *= gl.load(kv_scales + HEADS // GROUP + head)
    value = rows.to(out.dtype.element_ty)
    gl.store(out + gl.expand_dims(row * D, 0) + d, value, mask=gl.expand_dims(keep, 0))


@gluon.jit
def _next(i, phase, STAGES: gl.constexpr):
    """Return the ring's next place, and the parity of its barriers there."""
    last = i == STAGES - 1
    return gl.where(last, 0, i + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def _place(plan, FIELDS: gl.constexpr):
    """Return this program's share: sequence, head, tile, units; keys and queries there."""
    mine = plan + gl.program_id(0) * FIELDS
    return (
        gl.load(mine), gl.load(mine + 1), gl.load(mine + 2), gl.load(mine + 3),
        gl.load(mine + 5), gl.load(mine + 7),
    )  # fmt: skip


@gluon.jit
def _skipped(length, queries, TILE: gl.constexpr, WINDOW: gl.constexpr):
    """Return the tiles before the window of a sequence's first query, as plan_kernels.py counts."""
    return gl.maximum(length - gl.maximum(queries, 1) - WINDOW + 1, 0) // TILE if WINDOW else 0


@gluon.jit
def _reach(tile, left, length, queries, TILE: gl.constexpr, WINDOW: gl.constexpr):
    """Return the pair's tiles, those within a share with `left` units, and their begin and end.

    `tile` counts from the first tile of the window, begin and end from that of the sequence.
    """
    skipped = _skipped(length, queries, TILE, WINDOW)
    tiles = gl.maximum(gl.cdiv(length, TILE) - skipped, 1)
    take = gl.minimum(left, tiles - tile)
    begin = skipped + tile
    return tiles, take, begin, gl.where(length > 0, begin + take, begin)  # no key if empty


@gluon.jit
def _copy_tile(
    kv_desc, tail_desc, k_row, v_row, tokens, k, v, full, D: gl.constexpr, TILE: gl.constexpr
):
    """Copy K and V of a tile; of the last one, only the quarters that hold a token."""
    PART: gl.constexpr = TILE // 4
    BOTH: gl.constexpr = 2 * D * (kv_desc.dtype.primitive_bitwidth // 8)
    parts = gl.cdiv(tokens, PART)
    if parts >= 4:
        mbarrier.expect(full, TILE * BOTH)
        load_box(kv_desc, [k_row, 0], full, k)
        load_box(kv_desc, [v_row, 0], full, v)
    else:
        for p in gl.static_range(1, 4):
            if parts == p:
                mbarrier.expect(full, p * PART * BOTH)
        for p in gl.static_range(3):
            if parts > p:
                load_box(tail_desc, [k_row + p * PART, 0], full, k.slice(p * PART, PART, dim=0))
                load_box(tail_desc, [v_row + p * PART, 0], full, v.slice(p * PART, PART, dim=0))


@gluon.jit
def _producer(
    kv_desc, tail_desc, tables, lengths, starts, plan, table_row, block_rows, two_rows, head_rows,
    ks, vs, full, empty,
    KV_HEADS: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, TILE: gl.constexpr,
    WINDOW: gl.constexpr, STAGES: gl.constexpr, FIELDS: gl.constexpr, AHEAD: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    if not AHEAD:
        wait(PDL)
    seq, head, tile, left, length, queries = _place(plan, FIELDS)
    block = gl.load(plan + gl.program_id(0) * FIELDS + 8)
    i = 0
    phase = 1
    while left > 0:
        _, take, begin, end = _reach(tile, left, length, queries, TILE, WINDOW)
        last = gl.maximum(gl.cdiv(length, TILE), 1) - 1
        table = tables + seq.to(gl.int64) * table_row
        for j in range(begin, end):
            row = block * block_rows + head * head_rows + j * TILE % PAGE
            # Read before the ring is waited for, to hide the latency.
            block = gl.load(table + gl.minimum(j + 1, last) * TILE // PAGE)
            mbarrier.wait(empty.index(i), phase)
            if AHEAD:  # noqa: SIM102 - this one is a constant, the other is not
                if (j + 1) * TILE > length - queries:
                    wait(PDL)
            _copy_tile(
                kv_desc, tail_desc, row, row + two_rows, length - j * TILE,
                ks.index(i), vs.index(i), full.index(i), D, TILE,
            )  # fmt: skip
            i, phase = _next(i, phase, STAGES)
        left -= take
        tile = 0
        head += 1
        if head == KV_HEADS:
            head = 0
            seq += 1
            if left > 0:
                length = gl.load(lengths + seq)
                queries = gl.load(starts + seq + 1) - gl.load(starts + seq)
        if left > 0:
            page = _skipped(length, queries, TILE, WINDOW) * TILE // PAGE
            block = gl.load(tables + seq.to(gl.int64) * table_row + page)


@gluon.jit
def _fetch_queries(
    q, qs, q_first, q_len, head, q_t, q_h,
    GROUP: gl.constexpr, N: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Copy a pair's query rows to qs [N, D]; zero for rows that do not exist."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    n = gl.arange(0, N, gl.SliceLayout(1, L))
    d = gl.expand_dims(gl.arange(0, D, gl.SliceLayout(0, L)), 0)
    at = (q_first + n // GROUP).to(gl.int64) * q_t + (head * GROUP + n % GROUP) * q_h
    keep = gl.expand_dims(n // GROUP < q_len, 1)
    qs.store(gl.load(q + gl.expand_dims(at, 1) + d, mask=keep, other=0.0))
    fence_async_shared()


@gluon.jit
def _score(k, queries, TILE: gl.constexpr, N: gl.constexpr, ML: gl.constexpr):
    """Start S^T = K Q^T: [TILE, N]."""
    zeros = gl.zeros([TILE, N], gl.float32, ML)
    return warpgroup_mma(k, queries.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _weigh(
    s, top, mass, ps, key0, seen, scale,
    TILE: gl.constexpr, N: gl.constexpr, WINDOW: gl.constexpr, ML: gl.constexpr,
):  # fmt: skip
    """Take one step of the online softmax: weights to ps [N, TILE]; new maxima, masses, factor."""
    key = gl.expand_dims(key0 + gl.arange(0, TILE, gl.SliceLayout(1, ML)), 1)
    visible = key < gl.expand_dims(seen, 0)
    if WINDOW:
        visible = visible & (key >= gl.expand_dims(seen - WINDOW, 0))
    s = gl.where(visible, s * scale, -1e30)
    new = gl.maximum(top, gl.max(s, 0))
    p = gl.where(visible, gl.exp2(s - gl.expand_dims(new, 0)), 0.0)
    old = gl.expand_dims(gl.exp2(top - new), 0)
    ps.store(gl.permute(p.to(ps.dtype), (1, 0)))
    return new, mass * old + p, old


@gluon.jit
def _attend(
    first, last, length, seen, scale, i, phase, queries, ps, ks, vs, full, empty,
    D: gl.constexpr, TILE: gl.constexpr, N: gl.constexpr, WINDOW: gl.constexpr,
    STAGES: gl.constexpr, ML: gl.constexpr,
):  # fmt: skip
    """Sum over tiles first..last - 1: O^T [D, N], maxima, masses, place in the ring.

    A mass is the sum of a column's weights, kept as [TILE, N] until the end; `seen` [N] is the
    number of keys up to each column's own. Q K^T of the next tile is issued after P V of
    this one.
    """
    top = gl.full([N], -1e30, gl.float32, gl.SliceLayout(0, ML))
    mass = gl.zeros([TILE, N], gl.float32, ML)
    acc = gl.zeros([D, N], gl.float32, ML)
    weights = ps.permute((1, 0))
    if first < last:
        mbarrier.wait(full.index(i), phase)
        s_wait = _score(ks.index(i), queries, TILE, N, ML)
        s = warpgroup_mma_wait(0, deps=[s_wait])
        for j in range(first, last - 1):
            top, mass, old = _weigh(s, top, mass, ps, j * TILE, seen, scale, TILE, N, WINDOW, ML)
            fence_async_shared()
            o_wait = warpgroup_mma(vs.index(i).permute((1, 0)), weights, acc * old, is_async=True)
            done = empty.index(i)
            i, phase = _next(i, phase, STAGES)
            mbarrier.wait(full.index(i), phase)
            s_wait = _score(ks.index(i), queries, TILE, N, ML)
            acc = warpgroup_mma_wait(1, deps=[o_wait])
            mbarrier.arrive(done, count=1)
            s = warpgroup_mma_wait(0, deps=[s_wait])
        key0 = (last - 1) * TILE
        top, mass, old = _weigh(s, top, mass, ps, key0, seen, scale, TILE, N, WINDOW, ML)
        if key0 + TILE > length:
            blank_rows(vs.index(i), length - key0, TILE, D, TILE)
        fence_async_shared()
        o_wait = warpgroup_mma(vs.index(i).permute((1, 0)), weights, acc * old, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[o_wait])
        mbarrier.arrive(empty.index(i), count=1)
        i, phase = _next(i, phase, STAGES)
    return acc, top, mass, i, phase


@gluon.jit
def _read_codes(tile, empty, LAST: gl.constexpr, LAYOUT: gl.constexpr, TYPE: gl.constexpr):
    """Return a tile in shared memory as numbers in registers; free its place after the LAST."""
    codes = tile.load(LAYOUT)
    if LAST:
        mbarrier.arrive(empty, count=1)  # after all four warps have read
    if gl.bfloat16 == TYPE:  # by way of float32, because from float16 it takes longer
        return codes.to(gl.float32).to(TYPE)
    return codes.to(TYPE)


@gluon.jit
def _attend_codes(
    first, last, length, seen, scale, i, phase, queries, ps, ks, vs, full, empty,
    D: gl.constexpr, TILE: gl.constexpr, N: gl.constexpr, WINDOW: gl.constexpr,
    STAGES: gl.constexpr, ML: gl.constexpr,
):  # fmt: skip
    """Do what ``_attend`` does over tiles of codes.

    A tile's place is free once both are in registers. Tiles are read while P V of the one before is
    computed.
    """
    A: gl.constexpr = gl.DotOperandLayout(0, ML, 2)
    TYPE: gl.constexpr = queries.dtype
    top = gl.full([N], -1e30, gl.float32, gl.SliceLayout(0, ML))
    mass = gl.zeros([TILE, N], gl.float32, ML)
    acc = gl.zeros([D, N], gl.float32, ML)
    weights = ps.permute((1, 0))
    if first < last:
        mbarrier.wait(full.index(i), phase)
        k = _read_codes(ks.index(i), empty.index(i), False, A, TYPE)
        s_wait = _score(k, queries, TILE, N, ML)
        v = _read_codes(vs.index(i).permute((1, 0)), empty.index(i), True, A, TYPE)
        i, phase = _next(i, phase, STAGES)
        s = warpgroup_mma_wait(0, deps=[s_wait])
        for j in range(first, last - 1):
            top, mass, old = _weigh(s, top, mass, ps, j * TILE, seen, scale, TILE, N, WINDOW, ML)
            fence_async_shared()
            o_wait = warpgroup_mma(v, weights, acc * old, is_async=True)
            mbarrier.wait(full.index(i), phase)
            k = _read_codes(ks.index(i), empty.index(i), False, A, TYPE)
            s_wait = _score(k, queries, TILE, N, ML)
            v = _read_codes(vs.index(i).permute((1, 0)), empty.index(i), True, A, TYPE)
            i, phase = _next(i, phase, STAGES)
            acc = warpgroup_mma_wait(1, deps=[o_wait])
            s = warpgroup_mma_wait(0, deps=[s_wait])
        key0 = (last - 1) * TILE
        top, mass, old = _weigh(s, top, mass, ps, key0, seen, scale, TILE, N, WINDOW, ML)
        # A page's unused rows may hold codes of NaN.
        held = gl.expand_dims(key0 + gl.arange(0, TILE, gl.SliceLayout(0, A)) < length, 0)
        v = gl.where(held, v, gl.zeros_like(v))
        fence_async_shared()
        o_wait = warpgroup_mma(v, weights, acc * old, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[o_wait])
    return acc, top, mass, i, phase


@gluon.jit
def _consumer(  # noqa: PLR0915 - a partition is one function
    q, lengths, starts, out, plan, pieces, stats, arrivals, q_t, q_h, scale, kv_scales,
    qs, ps, ks, vs, full, empty,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, TILE: gl.constexpr,
    WINDOW: gl.constexpr, N: gl.constexpr, KEPT: gl.constexpr, WIDE: gl.constexpr,
    STAGES: gl.constexpr, FIELDS: gl.constexpr, SPACING: gl.constexpr, CODES: gl.constexpr,
    AHEAD: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    ML: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16]
    )
    L: gl.constexpr = gl.BlockedLayout([4, 1], [D // 4, 128 // D], [1, 4], [0, 1])
    HEADS: gl.constexpr = KV_HEADS * GROUP
    if not AHEAD:
        wait(PDL)
    me = gl.program_id(0)
    seq, head, tile, left, length, q_len = _place(plan, FIELDS)
    share = gl.load(plan + me * FIELDS + 4)
    q_first = gl.load(plan + me * FIELDS + 6)
    if AHEAD:
        wait(PDL)
    release(PDL)
    unit = me * share
    token = gl.arange(0, N, gl.SliceLayout(0, ML)) // GROUP
    i = 0
    phase = 0
    while left > 0:
        tiles, take, begin, end = _reach(tile, left, length, q_len, TILE, WINDOW)
        _fetch_queries(q, qs, q_first, q_len, head, q_t, q_h, GROUP, N, D)
        if CODES:
            acc, top, mass, i, phase = _attend_codes(
                begin, end, length, length - q_len + token + 1,
                scale * gl.load(kv_scales + head), i, phase,
                qs, ps, ks, vs, full, empty, D, TILE, N, WINDOW, STAGES, ML,
            )  # fmt: skip
        else:
            acc, top, mass, i, phase = _attend(
                begin, end, length, length - q_len + token + 1, scale, i, phase,
                qs, ps, ks, vs, full, empty, D, TILE, N, WINDOW, STAGES, ML,
            )  # fmt: skip
        acc = gl.convert_layout(acc, L)
        top = gl.convert_layout(top, gl.SliceLayout(0, L))
        total = gl.convert_layout(gl.sum(mass, 0), gl.SliceLayout(0, L))
        whole = take == tiles
        if not whole:
            slot = me * 2 + (unit > me * share).to(gl.int32)
            leave_piece(pieces, stats, slot, acc, top, total, KEPT, N, D, L)
            head_first = unit - tile
            first = head_first // share
            last = (head_first + tiles - 1) // share
            counter = arrivals + (seq * KV_HEADS + head) * SPACING
            barrier()
            if gl.atomic_add(counter, 1, sem="acq_rel") == last - first:
                gl.store(counter, 0)
                acc, total = merge_pieces(
                    pieces, stats, head_first, first, last, share, KEPT, N, D, WIDE, L
                )
                whole = True
        if whole:
            write(out, acc, total, q_first, q_len, head, kv_scales, GROUP, HEADS, N, D, L, CODES)
        unit += take
        left -= take
        tile = 0
        head += 1
        if head == KV_HEADS:
            head = 0
            seq += 1
            if left > 0:
                length = gl.load(lengths + seq)
                q_first = gl.load(starts + seq)
                q_len = gl.load(starts + seq + 1) - q_first


@gluon.jit(do_not_specialize=["tables", "lengths", "starts", "table_row"])
def decode_stream(
    kv_desc, tail_desc, q, tables, lengths, starts, out, plan, pieces, stats, arrivals,
    q_t, q_h, table_row, block_rows, two_rows, head_rows, scale, kv_scales,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr,
    TILE: gl.constexpr, WINDOW: gl.constexpr, N: gl.constexpr, KEPT: gl.constexpr,
    WIDE: gl.constexpr, STAGES: gl.constexpr, FIELDS: gl.constexpr, SPACING: gl.constexpr,
    CODES: gl.constexpr, PRODUCER_REGS: gl.constexpr, AHEAD: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Compute one share of the line of units. Grid: (shares,), 4 warps.

    kv_desc: rows of D, boxes [TILE, D], and tail_desc the same in boxes of a quarter; the first row
    of (block, K|V, KV head) is block * block_rows + K|V * two_rows + KV head * head_rows. q
    [tokens, heads, D] with strides q_t, q_h; out [tokens, heads, D] dense; the rest as in plan.py.
    Column n of a tile is query token n // GROUP, query head n % GROUP of the KV head; KEPT of the N
    columns can be real. TILE divides PAGE. WINDOW is 0 if there is none. scale carries log2(e).
    With CODES kv_desc has codes, of which kv_scales [2, KV_HEADS] are the factors.
    AHEAD requires that the kernel before last has ended, with the plan.
    """
    ROWS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    qs = gl.allocate_shared_memory(q.dtype.element_ty, [N, D], ROWS)
    ps = gl.allocate_shared_memory(q.dtype.element_ty, [N, TILE], ROWS)
    ks = gl.allocate_shared_memory(kv_desc.dtype, [STAGES, TILE, D], kv_desc.layout)
    vs = gl.allocate_shared_memory(kv_desc.dtype, [STAGES, TILE, D], kv_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consumer, (
                q, lengths, starts, out, plan, pieces, stats, arrivals, q_t, q_h, scale, kv_scales,
                qs, ps, ks, vs, full, empty,
                KV_HEADS, GROUP, D, TILE, WINDOW, N, KEPT, WIDE, STAGES, FIELDS, SPACING,
                CODES, AHEAD, PDL,
            )),
            (_producer, (
                kv_desc, tail_desc, tables, lengths, starts, plan, table_row,
                block_rows, two_rows, head_rows, ks, vs, full, empty,
                KV_HEADS, D, PAGE, TILE, WINDOW, STAGES, FIELDS, AHEAD, PDL,
            )),
        ],
        [1],
        [PRODUCER_REGS],
    )  # fmt: skip
