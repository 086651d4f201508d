"""Jit code of drafts, a program a row."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=[
        "rows", "lens", "chunk_starts", "token_ids", "positions", "blocks", "offsets", "seq_lens",
        "tables", "draws", "decodes", "tokens", "table_group", "table_row", "num_draws",
    ]
)  # fmt: skip
def place_rows(
    history, lengths, drafts, rows, lens, chunk_starts, token_ids, positions, blocks, offsets,
    seq_lens, tables, draws, earlier, decodes, most, groups, tokens, table_group, table_row,
    num_draws, BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Complete the rows of a step; see `place`. Grid: rows."""
    at = tl.program_id(0)
    row, end = tl.load(rows + at), tl.load(lens + at)
    if end >= 0:
        tl.store(lengths + row, end)
        tl.store(earlier + at, 0)
    else:
        first, count = at, 1
        if at >= decodes:
            start = tl.load(chunk_starts + at - decodes)
            count = tl.load(chunk_starts + at - decodes + 1) - start
            first = decodes + start
        begin = tl.load(lengths + row) - 1
        each = tl.arange(0, WIDTH)
        real = each < count
        draft = tl.load(drafts + row * most + each - 1, mask=real & (each > 0), other=0)
        tl.store(token_ids + first + each, tl.maximum(draft, 0), mask=real & (each > 0))
        position = begin + each
        tl.store(positions + first + each, position, mask=real)
        tl.store(offsets + first + each, position % BLOCK_SIZE, mask=real)
        for group in range(groups):
            table = tables + group * table_group + at * table_row
            block = tl.load(table + position // BLOCK_SIZE, mask=real, other=0)
            tl.store(blocks + group * tokens + first + each, block.to(tl.int64), mask=real)
        by = tl.load(seq_lens + at) - (begin + count)
        tl.store(earlier + at, by)
        tl.store(seq_lens + at, (begin + count).to(tl.int32))
        if num_draws > 0:
            output = draws + 2 * decodes + at
            tl.store(output, tl.load(output) - by)


@triton.jit(do_not_specialize=["rows", "spans", "token_ids", "last_tokens", "results", "n", "span"])
def accept_rows(
    history, lengths, drafts, rows, spans, token_ids, last_tokens, results, n, span, spare, columns,
    most, WIDTH: tl.constexpr,
):  # fmt: skip
    """Append the samples that are kept; see `accept`. Grid: n."""
    at = tl.program_id(0)
    row = tl.load(rows + at)
    if row != spare:
        first, count = tl.load(spans + at), tl.load(spans + span + at)
        each = tl.arange(0, WIDTH)
        sampled = tl.load(token_ids + first + each, mask=each < count, other=-2)
        compared = each < count - 1
        draft = tl.load(drafts + row * most + each, mask=compared, other=-1)
        wrong = tl.where((sampled != draft) | (each >= count - 1), each, WIDTH)
        accepted = tl.min(wrong, 0)
        known = tl.load(lengths + row)
        kept = (each <= accepted) & (known + each < columns)
        tl.store(history + row * columns + known + each, sampled.to(tl.int32), mask=kept)
        tl.store(lengths + row, known + accepted + 1)
        tl.store(last_tokens + row, tl.sum(tl.where(each == accepted, sampled, 0), 0))
        tl.store(results + at, accepted.to(tl.int64))
        num_drafts = tl.sum(tl.where(compared & (draft >= 0), 1, 0), 0)
        tl.store(results + n + at, num_drafts.to(tl.int64))


@triton.jit(do_not_specialize=["rows", "counts"])
def look_up_rows(
    history, lengths, drafts, rows, counts, columns, most_drafts,
    LEAST: tl.constexpr, MOST: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Propose the tokens after the longest last n-gram; see `lookup`. Grid: rows.

    A place's rank has the length of its n-gram, then whether enough tokens follow, then its order.
    """
    at = tl.program_id(0)
    row = tl.load(rows + at)
    known = tl.load(lengths + row)
    tokens = history + row * columns
    best = tl.full([BLOCK], -1, dtype=tl.int64)
    for start in range(0, known - 1, BLOCK):
        end = start + tl.arange(0, BLOCK)
        same = end < known - 1
        size = tl.zeros([BLOCK], dtype=tl.int64)
        for back in tl.static_range(MOST):
            same = same & (end >= back)
            token = tl.load(tokens + end - back, mask=same, other=-1)
            # No place is that far from the start if the last n-gram is not.
            wanted = tl.load(tokens + tl.maximum(known - 1 - back, 0))
            same = same & (token == wanted)
            size += same.to(tl.int64)
        whole = end + most_drafts < known
        order = tl.where(whole, end, 0x7FFFFFFF - end).to(tl.int64)
        rank = (size << 33) | (whole.to(tl.int64) << 32) | order
        best = tl.maximum(best, tl.where(size >= LEAST, rank, -1))
    rank = tl.max(best, 0)
    order = rank & 0x7FFFFFFF
    end = tl.where((rank >> 32) & 1 == 1, order, 0x7FFFFFFF - order)
    count = tl.minimum(tl.where(rank >= 0, known - 1 - end, 0), most_drafts)
    each = tl.arange(0, WIDTH)
    token = tl.load(tokens + end + 1 + each, mask=each < count, other=-1)
    tl.store(drafts + row * most_drafts + each, token.to(tl.int64), mask=each < most_drafts)
    tl.store(counts + at, count.to(tl.int64))
