"""Jit code that lists the tiles of a prefill batch on the device, heaviest first."""

from __future__ import annotations

import triton
import triton.language as tl

PLAN_FIELDS = (
    8  # query row, rows, position of the first, end of its keys, keys in all, sequence, 2 unused
)


@triton.jit
def _heavier(bar, cached, others, BM: tl.constexpr, WINDOW: tl.constexpr):
    """Count the tiles before a sequence's last that attend to more than `bar` keys of a window.

    Their keys rise with the tile, up to BM + WINDOW - 1.
    """
    below = tl.minimum(tl.maximum(bar - cached, 0) // BM, others)
    return tl.where(bar < BM + WINDOW - 1, others - below, 0)


@triton.jit
def _rank(keys, first, at, seq, tiles, cached, length, BM: tl.constexpr, WINDOW: tl.constexpr):
    """Return each tile's rank among those of all sequences [SEQS], by the keys of its window."""
    last_position = cached + (tiles - 1) * BM
    of_last = tl.where(tiles > 0, length - tl.maximum(last_position - WINDOW + 1, 0), -1)[None, :]
    others = tl.maximum(tiles - 1, 0)[None, :]
    cached = cached[None, :]
    keys = keys[:, None]
    at = at[:, None]
    seq = seq[None, :]
    more = _heavier(keys, cached, others, BM, WINDOW)
    as_many = _heavier(keys - 1, cached, others, BM, WINDOW)
    # Of equal tiles those of earlier sequences come first, and in a sequence the earlier tiles.
    tile = (first // BM)[:, None]
    lighter_before = others - as_many
    own = tl.where(tile < others, more + tile - lighter_before + (of_last > keys), as_many)
    earlier = as_many + (of_last >= keys)
    later = more + (of_last > keys)
    return tl.sum(tl.where(seq == at, own, tl.where(seq < at, earlier, later)), 1)


@triton.jit(do_not_specialize=["cu_seqlens_q", "lengths", "num_seqs", "max_tiles"])
def plan_tiles(
    cu_seqlens_q,
    lengths,
    plan,
    count,
    num_seqs,
    max_tiles,
    BM: tl.constexpr,
    WINDOW: tl.constexpr,
    SEQS: tl.constexpr,
    TILES: tl.constexpr,
    FIELDS: tl.constexpr,
):
    """Cut each sequence's queries into tiles of BM rows; write each tile at its rank by keys.

    The rank is a count in closed form over sequences, without a sort or second pass. Ties keep the
    order of sequences. Grid: cdiv(max_tiles, TILES); SEQS >= num_seqs, a power of two. WINDOW is 0
    if there is none.
    """
    seq = tl.arange(0, SEQS)
    real = seq < num_seqs
    start = tl.load(cu_seqlens_q + seq, mask=real, other=0)
    queries = tl.load(cu_seqlens_q + seq + 1, mask=real, other=0) - start
    length = tl.load(lengths + seq, mask=real, other=0)
    cached = length - queries
    tiles = tl.where(real, tl.cdiv(queries, BM), 0)
    ends = tl.cumsum(tiles, 0)
    index = tl.program_id(0) * TILES + tl.arange(0, TILES)
    at = tl.sum((ends[None, :] <= index[:, None]).to(tl.int32), 1)
    here = (seq[None, :] == at[:, None]).to(tl.int32)
    first = (index - tl.sum(here * (ends - tiles)[None, :], 1)) * BM
    my_queries = tl.sum(here * queries[None, :], 1)
    my_length = tl.sum(here * length[None, :], 1)
    position = tl.sum(here * cached[None, :], 1) + first
    keys = tl.minimum(my_length, position + BM)
    if WINDOW:
        visited = keys - tl.maximum(position - WINDOW + 1, 0)
        rank = _rank(visited, first, at, seq, tiles, cached, length, BM, WINDOW)
    else:
        # Tiles of each sequence that attend to more keys than this one; equals count if they come
        # before.
        bar = keys[:, None] - (seq[None, :] < at[:, None]).to(tl.int32)
        below = tl.minimum(
            tl.maximum(bar - cached[None, :], 0) // BM, tl.maximum(tiles - 1, 0)[None, :]
        )
        above = tl.where(length[None, :] > bar, tiles[None, :] - below, 0)
        rank = tl.sum(above, 1)
    total = tl.sum(tiles, 0)
    keep = (index < total) & (index < max_tiles)
    row = plan + rank * FIELDS
    tl.store(row, tl.sum(here * start[None, :], 1) + first, mask=keep)
    tl.store(row + 1, my_queries - first, mask=keep)
    tl.store(row + 2, position, mask=keep)
    tl.store(row + 3, keys, mask=keep)
    tl.store(row + 4, my_length, mask=keep)
    tl.store(row + 5, at, mask=keep)
    if tl.program_id(0) == 0:
        tl.store(count, total)
