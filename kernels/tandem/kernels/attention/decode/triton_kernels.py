"""Jit code of paged decode attention: one launch over the shares of a planned batch
(plan_kernels.py)."""

from __future__ import annotations

import triton
import triton.language as tl

from tandem.kernels.attention.triton_kernels import (
    LOG2E,
    in_type,
    load_heads,
    mask_heads,
    score,
)
from tandem.kernels.launch.triton_kernels import prefetch, release, wait

from .plan_kernels import first_tile

# As in plan_kernels.py.
_LOOSE = ["block_tables", "lengths", "cu_seqlens_q", "table_row", "num_blocks"]


@triton.jit
def _merge_pieces(
    pieces, stats, head_first, first, last, share,
    KEPT: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Sum the pieces of shares first..last: rows [KEPT, WIDTH], and their sums [KEPT].

    WIDE pieces are loaded at a time: one latency of L2 for each WIDE.
    """
    rows = tl.arange(0, KEPT)
    cols = tl.arange(0, WIDTH)
    # The first share of a pair has its piece in slot 1, unless the pair begins with the share.
    first_slot = first * 2 + (head_first > first * share).to(tl.int32)
    top = tl.full([KEPT], -1e30, tl.float32)
    total = tl.zeros([KEPT], tl.float32)
    acc = tl.zeros([KEPT, WIDTH], tl.float32)
    for start in tl.range(first, last + 1, WIDE):
        maxima = ()
        sums = ()
        parts = ()
        for i in tl.static_range(WIDE):
            which = start + i + tl.zeros_like(rows)
            keep = which <= last
            at = tl.where(which == first, first_slot, which * 2) * KEPT + rows
            part = tl.load(
                pieces + at[:, None] * D + cols[None, :],
                mask=mask_heads(keep, cols, D, WIDTH),
                other=0.0,
                cache_modifier=".cg",
            )
            m = tl.load(stats + at * 2, mask=keep, other=-1e30, cache_modifier=".cg")
            s = tl.load(stats + at * 2 + 1, mask=keep, other=0.0, cache_modifier=".cg")
            maxima = maxima + (m,)  # type: ignore[assignment]  # noqa: RUF005
            sums = sums + (s,)  # type: ignore[assignment]  # noqa: RUF005
            parts = parts + (part,)  # type: ignore[assignment]  # noqa: RUF005
        new = top
        for i in tl.static_range(WIDE):
            new = tl.maximum(new, maxima[i])
        old = tl.exp2(top - new)
        total = total * old
        acc = acc * old[:, None]
        for i in tl.static_range(WIDE):
            weight = tl.exp2(maxima[i] - new)
            total += sums[i] * weight
            acc += parts[i] * weight[:, None]
        top = new
    return acc, total


@triton.jit
def _write(
    out,
    acc,
    total,
    token,
    head,
    keep,
    gain,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Normalise and store rows, times `gain` if there is one; a row over no key is zero."""
    cols = tl.arange(0, WIDTH)
    safe = tl.where(total > 0.0, total, 1.0)
    rows = acc / safe[:, None]
    if gain is not None:
        rows *= gain
    value = rows.to(out.dtype.element_ty)
    row = token.to(tl.int64) * HEADS + head
    tl.store(out + row[:, None] * D + cols[None, :], value, mask=mask_heads(keep, cols, D, WIDTH))


@triton.jit(do_not_specialize=_LOOSE)
def decode_shares(  # noqa: C901, PLR0915 - a kernel is one function
    q,
    kv,
    block_tables,
    lengths,
    cu_seqlens_q,
    out,
    plan,
    pieces,
    stats,
    arrivals,
    q_t,
    q_h,
    kv_block,
    kv_two,
    kv_head,
    table_row,
    num_blocks,
    scale,
    cap,
    sinks,
    slopes,
    kv_scales,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
    KEPT: tl.constexpr,
    WIDE: tl.constexpr,
    FIELDS: tl.constexpr,
    SPACING: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
    RELEASE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute one share of the line of units. Grid: (num_shares,).

    q [tokens, heads, D] with strides q_t, q_h; kv [blocks, K|V, KV_HEADS, PAGE, D] with strides
    kv_block, kv_two, kv_head and dense pages; out [tokens, heads, D] dense. Row r of a tile is
    query token r // GROUP, query head r % GROUP of the KV head; ROWS >= 16 is the matrix unit's
    size, KEPT <= ROWS the power of two that holds a sequence's rows, WIDTH >= D that of a head.
    scale and cap are those of Scores.in_log2; cap, sinks and slopes may be None, WINDOW 0. With
    kv_scales [2, KV_HEADS] pages hold codes, which are multiplied in the type of q. AHEAD
    fetches the first page before the wait, and requires that the kernel before last has ended with
    the plan. RELEASE lets the next kernel start after the first keys. float32 is not rounded.
    """
    HEADS: tl.constexpr = KV_HEADS * GROUP
    PRECISION: tl.constexpr = "ieee" if q.dtype.element_ty == tl.float32 else "tf32"
    LINE: tl.constexpr = 64 if kv_scales is None else 128
    me = tl.program_id(0)
    mine = plan + me * FIELDS
    if AHEAD:  # noqa: SIM102 - this one is a constant, the other is not
        if tl.load(mine + 3) > 0:
            at = tl.load(mine + 8).to(tl.int64) * kv_block + tl.load(mine + 1) * kv_head
            near = tl.load(mine + 2)
            if WINDOW:
                near += tl.load(mine + 9)
            lines = tl.arange(0, TILE * WIDTH // LINE) * LINE
            if D < WIDTH:
                lines = tl.minimum(lines, TILE * D - LINE)
            line = at + (near * TILE % PAGE) * D + lines
            prefetch((kv + line).to(tl.int64))
            prefetch((kv + kv_two + line).to(tl.int64))
    wait(PDL)
    seq = tl.load(mine)
    head = tl.load(mine + 1)
    tile = tl.load(mine + 2)
    left = tl.load(mine + 3)
    share = tl.load(mine + 4)
    length = tl.load(mine + 5)
    q_first = tl.load(mine + 6)
    q_len = tl.load(mine + 7)
    block = tl.load(mine + 8)
    skipped = 0  # tiles before the window
    if WINDOW:
        skipped = tl.load(mine + 9)
    unit = me * share
    rows = tl.arange(0, ROWS)
    cols = tl.arange(0, WIDTH)
    in_tile = tl.arange(0, TILE)
    kept = tl.arange(0, KEPT)
    while left > 0:
        tiles = tl.maximum(tl.cdiv(length, TILE) - skipped, 1)
        take = tl.minimum(left, tiles - tile)
        token = rows // GROUP
        valid = token < q_len
        q_at = q + (q_first + token).to(tl.int64)[:, None] * q_t
        q_at += (head * GROUP + rows % GROUP)[:, None] * q_h + cols[None, :]
        queries = tl.load(q_at, mask=mask_heads(valid, cols, D, WIDTH), other=0.0)
        seen = length - q_len + token + 1  # keys up to a row's own
        top = tl.full([ROWS], -1e30, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        if sinks is not None:  # a key of its own before the pair's first tile, without a value
            sink = tl.load(sinks + head * GROUP + rows % GROUP) * LOG2E
            top = tl.where(tile == 0, sink, top)
            total = tl.where(tile == 0, 1.0, total)
        slope = None
        if slopes is not None:
            slope = tl.load(slopes + head * GROUP + rows % GROUP) * LOG2E
        factor = scale
        gain = None
        if kv_scales is not None:
            factor *= tl.load(kv_scales + head)
            gain = tl.load(kv_scales + KV_HEADS + head)
        acc = tl.zeros([ROWS, WIDTH], tl.float32)
        table = block_tables + seq.to(tl.int64) * table_row
        for j in tl.range(skipped + tile, skipped + tile + take, num_stages=STAGES):
            base = kv + block.to(tl.int64) * kv_block + head * kv_head + (j * TILE % PAGE) * D
            at = base + in_tile[None, :] * D + cols[:, None]
            k = in_type(load_heads(at, (cols < D)[:, None], D, WIDTH), queries.dtype)
            key = j * TILE + in_tile
            products = tl.dot(queries, k, input_precision=PRECISION)
            s = score(products, key, seen - 1, factor, cap, slope)
            visible = key[None, :] < seen[:, None]
            held = key < length
            if WINDOW:
                visible = visible & (key[None, :] >= seen[:, None] - WINDOW)
                held = held & (key > length - q_len - WINDOW)
            s = tl.where(visible, s, -1e30)
            new = tl.maximum(top, tl.max(s, 1))
            p = tl.where(visible, tl.exp2(s - new[:, None]), 0.0)
            old = tl.exp2(top - new)
            total = total * old + tl.sum(p, 1)
            # Masked, because a page's unused rows may hold anything and 0 x NaN is NaN.
            v = tl.load(
                base + kv_two + in_tile[:, None] * D + cols[None, :],
                mask=mask_heads(held, cols, D, WIDTH),
                other=0.0,
            )
            v = in_type(v, queries.dtype)
            acc = acc * old[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
            top = new
            # The next tile's block, an iteration before its address is needed.
            block = tl.load(table + tl.minimum(j + 1, skipped + tiles - 1) * TILE // PAGE)
        release(RELEASE)
        if take == tiles:
            h = head * GROUP + rows % GROUP
            _write(out, acc, total, q_first + token, h, valid, gain, HEADS, D, WIDTH)
        else:
            head_first = unit - tile
            slot = me * 2 + (unit > me * share).to(tl.int32)
            at = slot * KEPT + rows
            inside = mask_heads(rows < KEPT, cols, D, WIDTH)
            tl.store(pieces + at[:, None] * D + cols[None, :], acc, mask=inside)
            tl.store(stats + at * 2, top, mask=rows < KEPT)
            tl.store(stats + at * 2 + 1, total, mask=rows < KEPT)
            first = head_first // share
            last = (head_first + tiles - 1) // share
            counter = arrivals + (seq * KV_HEADS + head) * SPACING
            tl.debug_barrier()
            if tl.atomic_add(counter, 1, sem="acq_rel") == last - first:
                tl.store(counter, 0)
                sum_, mass = _merge_pieces(
                    pieces, stats, head_first, first, last, share, KEPT, D, WIDTH, WIDE
                )
                t = kept // GROUP
                h = head * GROUP + kept % GROUP
                _write(out, sum_, mass, q_first + t, h, t < q_len, gain, HEADS, D, WIDTH)
        unit += take
        left -= take
        tile = 0
        head += 1
        if head == KV_HEADS:
            head = 0
            seq += 1
            if left > 0:
                length = tl.load(lengths + seq)
                q_first = tl.load(cu_seqlens_q + seq)
                q_len = tl.load(cu_seqlens_q + seq + 1) - q_first
                if WINDOW:
                    skipped = first_tile(length, q_len, TILE, WINDOW)
        if left > 0:  # an empty sequence's table may hold anything
            block = tl.load(block_tables + seq.to(tl.int64) * table_row + skipped * TILE // PAGE)
            block = tl.minimum(tl.maximum(block, 0), num_blocks - 1)
