"""Jit code of the plan for both decode kernels: a batch as a line of units, cut into shares.

The line has a *unit* for each tile of `TILE` tokens, by sequence and KV head, from the first tile
that is in the window of a query. It is cut into equal
shares, one a program, so that lengths may differ (stream-K GEMM, Osama et al. 2023; Flash-Decoding,
Dao et al. 2023). A (sequence, head) of one program is written at once. One that is cut leaves a
piece (unnormalised rows, maxima, sums) for each share; the last program at its counter merges the
pieces and resets the counter.

A share has at most two cut pairs, hence two workspace slots.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tandem.kernels.launch.triton_kernels import follow

COUNTER_STRIDE = 8
"""int32s between counters: one L2 sector each, so that arrivals do not queue."""
PLAN_FIELDS = 16
"""Fields of a share: sequence, head, tile, units, units of a full one; of its first sequence: keys,
first query, queries; of its first tile: block; of its first sequence: first tile in the window."""


@triton.jit
def first_tile(length, queries, TILE: tl.constexpr, WINDOW: tl.constexpr):
    """Return the first tile with a key in the window of a sequence's first query."""
    return tl.maximum(length - tl.maximum(queries, 1) - WINDOW + 1, 0) // TILE


# Arguments that change from step to step must not build another kernel.
_LOOSE = ["block_tables", "lengths", "cu_seqlens_q", "table_row", "num_blocks"]


@triton.jit(do_not_specialize=[*_LOOSE, "num_seqs", "num_shares", "most_pieces"])
def plan_shares(
    lengths,
    cu_seqlens_q,
    block_tables,
    plan,
    arrivals,
    num_seqs,
    num_shares,
    most_pieces,
    table_row,
    num_blocks,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SEQS: tl.constexpr,
    SHARES: tl.constexpr,
    FIELDS: tl.constexpr,
    SPACING: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write where each share starts, and zero `arrivals` [num_seqs, KV_HEADS, SPACING].

    Grid: cdiv(num_shares, SHARES); SEQS is a power of two, at least num_seqs. A sequence without
    keys counts as one tile, so that its rows are written, too. WINDOW is 0 if there is none.
    """
    follow(PDL)
    seq = tl.arange(0, SEQS)
    if tl.program_id(0) == 0:
        for head in range(KV_HEADS):
            tl.store(arrivals + (seq * KV_HEADS + head) * SPACING, 0, mask=seq < num_seqs)
    length = tl.load(lengths + seq, mask=seq < num_seqs, other=0)
    tiles = tl.cdiv(length, TILE)
    skipped = tl.zeros_like(length)
    if WINDOW:
        query = tl.load(cu_seqlens_q + seq, mask=seq < num_seqs, other=0)
        queries = tl.load(cu_seqlens_q + seq + 1, mask=seq < num_seqs, other=0) - query
        skipped = first_tile(length, queries, TILE, WINDOW)
        tiles -= skipped
    tiles = tl.where(seq < num_seqs, tl.maximum(tiles, 1), 0)
    ends = tl.cumsum(tiles, 0) * KV_HEADS
    total = tl.sum(tiles, 0) * KV_HEADS
    # Fewer, longer shares if a pair would have too many pieces to merge (more for long ones), but
    # at least a quarter of them.
    longest = tl.max(tiles, 0)
    most = tl.maximum(most_pieces, tl.sqrt(longest.to(tl.float32)).to(tl.int32))
    longer = tl.minimum(tl.cdiv(longest, most), tl.cdiv(total, num_shares // 4 + 1))
    share = tl.maximum(tl.cdiv(total, num_shares), longer)
    index = tl.program_id(0) * SHARES + tl.arange(0, SHARES)
    first = index * share
    before = (ends[None, :] <= first[:, None]) & (seq < num_seqs)[None, :]
    at = tl.sum(before.to(tl.int32), 1)
    here = (seq[None, :] == at[:, None]).to(tl.int32)
    seq_tiles = tl.maximum(tl.sum(here * tiles[None, :], 1), 1)
    offset = first - tl.sum(here * (ends - tiles * KV_HEADS)[None, :], 1)
    keep = index < num_shares
    row = plan + index * FIELDS
    tl.store(row, at, mask=keep)
    tl.store(row + 1, offset // seq_tiles, mask=keep)
    tl.store(row + 2, offset % seq_tiles, mask=keep)
    tl.store(row + 3, tl.minimum(share, total - first), mask=keep)
    tl.store(row + 4, share + tl.zeros_like(index), mask=keep)
    inside = keep & (at < num_seqs)
    query = tl.load(cu_seqlens_q + at, mask=inside, other=0)
    tl.store(row + 5, tl.sum(here * length[None, :], 1), mask=keep)
    tl.store(row + 6, query, mask=keep)
    tl.store(row + 7, tl.load(cu_seqlens_q + at + 1, mask=inside, other=0) - query, mask=keep)
    tile = offset % seq_tiles
    if WINDOW:
        before_window = tl.sum(here * skipped[None, :], 1)
        tl.store(row + 9, before_window, mask=keep)
        tile += before_window
    page = tile * TILE // PAGE
    block = tl.load(block_tables + at.to(tl.int64) * table_row + page, mask=inside, other=0)
    tl.store(row + 8, tl.minimum(tl.maximum(block, 0), num_blocks - 1), mask=keep)
