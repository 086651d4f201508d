"""Jit code of the plan that both decode kernels follow: a batch as a line of units, cut in shares.

The work of a batch is a line of *units*: sequence by sequence, KV head by KV head, tile of `TILE`
tokens by tile. The line is cut into equal shares, one a program, so that lengths that differ
tenfold cost nothing (the idea of stream-K GEMM, Osama et al. 2023, on the split-KV attention of
Flash-Decoding, Dao et al. 2023). A (sequence, head) that falls to one program is written at once.
One that is cut leaves a piece (unnormalised rows, maxima, sums) for each share. The program that
arrives last at the counter of that (sequence, head) merges the pieces and sets the counter back to
zero.

A share touches at most two cut pairs, one at either end, hence two workspace slots a program: its
size depends on the grid alone. Launched by plan.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tandem.kernels.launch.triton_kernels import follow

COUNTER_STRIDE = 8
"""int32s from one counter to the next: a sector of L2 each, so that arrivals do not queue."""
PLAN_FIELDS = 16
"""Fields of a share. Of the share: sequence, head, tile, its units, units of a full one. Of its
first sequence: keys, first query, queries. Of its first tile: block."""


# What changes from step to step (counts, and where in a buffer a step's part begins) must not make
# another kernel: compiling one takes a second, in the middle of serving.
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
    SEQS: tl.constexpr,
    SHARES: tl.constexpr,
    FIELDS: tl.constexpr,
    SPACING: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write where each share starts, and zero `arrivals` [num_seqs, KV_HEADS, SPACING].

    Grid: cdiv(num_shares, SHARES); SEQS is a power of two, at least num_seqs. A sequence of no key
    counts as one tile, so that its rows are written too.
    """
    follow(PDL)
    seq = tl.arange(0, SEQS)
    if tl.program_id(0) == 0:
        for head in range(KV_HEADS):
            tl.store(arrivals + (seq * KV_HEADS + head) * SPACING, 0, mask=seq < num_seqs)
    length = tl.load(lengths + seq, mask=seq < num_seqs, other=0)
    tiles = tl.where(seq < num_seqs, tl.maximum(tl.cdiv(length, TILE), 1), 0)
    ends = tl.cumsum(tiles, 0) * KV_HEADS
    total = tl.sum(tiles, 0) * KV_HEADS
    # Fewer, longer shares where a pair would be cut into more pieces than are quick to merge (more
    # of them for long ones, where reading takes longer), but never fewer than a quarter of them.
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
    page = offset % seq_tiles * TILE // PAGE
    block = tl.load(block_tables + at.to(tl.int64) * table_row + page, mask=inside, other=0)
    tl.store(row + 8, tl.minimum(tl.maximum(block, 0), num_blocks - 1), mask=keep)
