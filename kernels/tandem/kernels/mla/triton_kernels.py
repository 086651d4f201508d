"""Jit code of latent attention: a program a tile of rows, by FlashAttention-2 (Dao 2023)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _rotate(even, odd, cos, sin, pair, keep, half):
    """Return rotated pairs, and load their angles of one token: cos first, sin from half on."""
    c = tl.load(cos + pair, mask=keep, other=0.0).to(tl.float32)
    s = tl.load(sin + half + pair, mask=keep, other=0.0).to(tl.float32)
    return even * c - odd * s, odd * c + even * s


# Offsets of a slot mapping in a buffer must not build another kernel.
@triton.jit(do_not_specialize=["blocks", "offsets"])
def write_latents(
    kv_a, kv, cos, sin, blocks, offsets, weight,
    row_stride, kv_block, kv_token, cos_row, sin_row, eps,
    RANK: tl.constexpr, ROPE: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Norm, rotate and write the row of one token. Grid: (tokens,).

    kv_a [tokens, RANK + ROPE] with a row stride; kv [blocks, page, RANK + ROPE] with strides
    kv_block and kv_token; cos and sin [tokens, ROPE] with row strides; weight [RANK]. WIDTH >= RANK
    and HALF >= ROPE / 2 are powers of two.
    """
    token = tl.program_id(0).to(tl.int64)
    to = kv + tl.load(blocks + token) * kv_block + tl.load(offsets + token) * kv_token
    row = kv_a + token * row_stride
    col = tl.arange(0, WIDTH)
    keep = col < RANK
    x = tl.load(row + col, mask=keep, other=0.0).to(tl.float32)
    gain = tl.load(weight + col, mask=keep, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / RANK + eps)
    tl.store(to + col, (x * scale * gain).to(kv.dtype.element_ty), mask=keep)
    pair = tl.arange(0, HALF)
    inside = pair < ROPE // 2
    even = tl.load(row + RANK + 2 * pair, mask=inside, other=0.0).to(tl.float32)
    odd = tl.load(row + RANK + 2 * pair + 1, mask=inside, other=0.0).to(tl.float32)
    even, odd = _rotate(
        even, odd, cos + token * cos_row, sin + token * sin_row, pair, inside, ROPE // 2
    )
    tl.store(to + RANK + 2 * pair, even.to(kv.dtype.element_ty), mask=inside)
    tl.store(to + RANK + 2 * pair + 1, odd.to(kv.dtype.element_ty), mask=inside)


@triton.jit
def rotate_pairs(
    q, cos, sin, q_t, cos_row, sin_row,
    HEADS: tl.constexpr, D: tl.constexpr, ROPE: tl.constexpr, HALF: tl.constexpr,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Rotate the last ROPE numbers of AT_ONCE heads of one token in place. Grid: (tokens,
    cdiv(HEADS, AT_ONCE)).

    q [tokens, HEADS, D] with stride q_t and dense heads; cos and sin [tokens, ROPE] with row
    strides; HALF >= ROPE / 2, a power of two.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
    pair = tl.arange(0, HALF)
    inside = pair < ROPE // 2
    real = (head < HEADS)[:, None] & inside[None, :]
    at = q + token * q_t + (head * D + D - ROPE)[:, None] + 2 * pair[None, :]
    even = tl.load(at, mask=real, other=0.0).to(tl.float32)
    odd = tl.load(at + 1, mask=real, other=0.0).to(tl.float32)
    even, odd = _rotate(
        even, odd, cos + token * cos_row, sin + token * sin_row, pair, inside, ROPE // 2
    )
    tl.store(at, even.to(q.dtype.element_ty), mask=real)
    tl.store(at + 1, odd.to(q.dtype.element_ty), mask=real)


_LOOSE = ["tables", "lengths", "starts", "table_row", "tokens"]


@triton.jit(do_not_specialize=[*_LOOSE, "splits"])
def attend_latents(  # noqa: PLR0915 - a kernel is one function
    q_latent, q_rope, kv, tables, lengths, starts, out, parts, stats,
    latent_t, latent_h, rope_t, rope_h, kv_block, table_row, tokens, splits, scale,
    HEADS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, WIDTH: tl.constexpr,
    ROPE_WIDTH: tl.constexpr, PAGE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    WHOLE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Attend a tile of BM rows of one sequence to one of `splits` parts of its keys. Grid: (row
    tiles, sequences, splits).

    Row r of a sequence is query r // HEADS, head r % HEADS. q_latent [tokens, HEADS, RANK] and
    q_rope [tokens, HEADS, ROPE] with strides; kv [blocks, PAGE, RANK + ROPE] with stride kv_block,
    dense pages, BN dividing PAGE; scale includes that of powers of two. WHOLE: there is one part,
    written to out [tokens, HEADS, RANK]; else parts, float32 [splits, tokens, HEADS, RANK], and
    stats [splits, tokens, HEADS], the logarithm of the sum. float32 is not rounded.
    """
    PRECISION: tl.constexpr = "ieee" if q_latent.dtype.element_ty == tl.float32 else "tf32"
    seq = tl.program_id(1)
    split = tl.program_id(2)
    first = tl.load(starts + seq)
    queries = tl.load(starts + seq + 1) - first
    length = tl.load(lengths + seq)
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    if tl.program_id(0) * BM < queries * HEADS:
        inside = row < queries * HEADS
        token = (first + row // HEADS).to(tl.int64)
        head = row % HEADS
        position = length - queries + row // HEADS
        col = tl.arange(0, WIDTH)
        rope_col = tl.arange(0, ROPE_WIDTH)
        in_rank = col < RANK
        in_rope = rope_col < ROPE
        at = q_latent + (token * latent_t + head * latent_h)[:, None] + col[None, :]
        latents = tl.load(at, mask=inside[:, None] & in_rank[None, :], other=0.0)
        at = q_rope + (token * rope_t + head * rope_h)[:, None] + rope_col[None, :]
        ropes = tl.load(at, mask=inside[:, None] & in_rope[None, :], other=0.0)
        top = tl.full([BM], -1e30, tl.float32)
        total = tl.zeros([BM], tl.float32)
        acc = tl.zeros([BM, WIDTH], tl.float32)
        last = tl.minimum(tl.program_id(0) * BM + BM, queries * HEADS) - 1
        tiles = tl.cdiv(tl.maximum(length - queries + last // HEADS + 1, 0), BN)
        share = tl.cdiv(tiles, splits)
        table = tables + seq.to(tl.int64) * table_row
        in_tile = tl.arange(0, BN)
        begin = split * share
        for j in tl.range(begin, tl.minimum(begin + share, tiles), num_stages=STAGES):
            page = kv + tl.load(table + j * BN // PAGE).to(tl.int64) * kv_block
            key = j * BN + in_tile
            rows = page + (j * BN % PAGE + in_tile)[:, None] * (RANK + ROPE)
            held = (key < length)[:, None]  # a page's unused rows may hold anything
            k = tl.load(rows + col[None, :], mask=held & in_rank[None, :], other=0.0)
            r = tl.load(rows + RANK + rope_col[None, :], mask=held & in_rope[None, :], other=0.0)
            s = tl.dot(latents, tl.trans(k), input_precision=PRECISION)
            s += tl.dot(ropes, tl.trans(r), input_precision=PRECISION)
            s = tl.where(key[None, :] <= position[:, None], s * scale, -float("inf"))
            new = tl.maximum(top, tl.max(s, 1))
            p = tl.exp2(s - new[:, None])
            old = tl.exp2(top - new)
            total = total * old + tl.sum(p, 1)
            acc = acc * old[:, None] + tl.dot(p.to(k.dtype), k, input_precision=PRECISION)
            top = new
        found = acc / tl.where(total > 0.0, total, 1.0)[:, None]
        kept = inside[:, None] & in_rank[None, :]
        if WHOLE:
            at = out + (token * HEADS + head)[:, None] * RANK + col[None, :]
            tl.store(at, found.to(out.dtype.element_ty), mask=kept)
        else:
            place = (split.to(tl.int64) * tokens + token) * HEADS + head
            tl.store(parts + place[:, None] * RANK + col[None, :], found, mask=kept)
            logs = tl.where(total > 0.0, top + tl.log2(total), -1e30)
            tl.store(stats + place, logs, mask=inside)


@triton.jit(do_not_specialize=["rows", "splits"])
def merge_splits(parts, stats, out, rows, splits, RANK: tl.constexpr, WIDTH: tl.constexpr):
    """Merge the parts of one row. Grid: (rows,).

    parts is float32 [splits, rows, RANK], stats [splits, rows], out [rows, RANK]. Rows of no
    sequence have no parts, and get any numbers.
    """
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, WIDTH)
    keep = col < RANK
    top = tl.full([], -1e30, tl.float32)
    total = tl.zeros([], tl.float32)
    acc = tl.zeros([WIDTH], tl.float32)
    for split in tl.range(0, splits):
        place = split.to(tl.int64) * rows + row
        log = tl.load(stats + place)
        new = tl.maximum(top, log)
        old = tl.exp2(top - new)
        weight = tl.exp2(log - new)
        part = tl.load(parts + place * RANK + col, mask=keep, other=0.0)
        acc = acc * old + part * weight
        total = total * old + weight
        top = new
    tl.store(out + row * RANK + col, (acc / total).to(out.dtype.element_ty), mask=keep)


@triton.jit(do_not_specialize=["tables", "lengths", "table_row", "begin", "room"])
def expand_latents(
    kv, kv_b, tables, lengths, expanded, kv_block, table_row, begin, room,
    HEADS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, BOTH: tl.constexpr,
    WIDTH: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Expand TILE latents of one sequence for one head: its keys and values. Grid: (cdiv(room,
    TILE), HEADS, sequences).

    Of each sequence the tokens from `begin` on, at most `room`, go to expanded [sequences, room,
    HEADS, BOTH], those after its end as zeros up to a whole tile. kv_b is [HEADS, BOTH, RANK];
    WIDTH >= BOTH is a power of two; TILE divides PAGE.
    """
    PRECISION: tl.constexpr = "ieee" if kv.dtype.element_ty == tl.float32 else "tf32"
    seq = tl.program_id(2)
    head = tl.program_id(1)
    in_tile = tl.program_id(0) * TILE + tl.arange(0, TILE)
    start = begin + tl.program_id(0) * TILE
    length = tl.load(lengths + seq)
    if start < length:
        table = tables + seq.to(tl.int64) * table_row
        page = kv + tl.load(table + start // PAGE).to(tl.int64) * kv_block
        at = page + (start % PAGE + tl.arange(0, TILE)) * (RANK + ROPE)
        held = begin + in_tile < length
        row = tl.arange(0, WIDTH)
        weight = kv_b + head * BOTH * RANK + row[None, :] * RANK
        acc = tl.zeros([TILE, WIDTH], tl.float32)
        for k in tl.range(0, RANK, BK):
            col = k + tl.arange(0, BK)
            x = tl.load(
                at[:, None] + col[None, :], mask=held[:, None] & (col < RANK)[None, :], other=0.0
            )
            w = tl.load(
                weight + col[:, None], mask=(col < RANK)[:, None] & (row < BOTH)[None, :], other=0.0
            )
            acc += tl.dot(x, w, input_precision=PRECISION)
        place = ((seq.to(tl.int64) * room + in_tile) * HEADS + head) * BOTH
        tl.store(
            expanded + place[:, None] + row[None, :],
            acc.to(expanded.dtype.element_ty),
            mask=(row < BOTH)[None, :] & (in_tile < room)[:, None],
        )


@triton.jit(do_not_specialize=[*_LOOSE[:-1], "begin", "room", "is_last"])
def attend_expanded(  # noqa: PLR0915 - a kernel is one function
    q, kv, expanded, tables, lengths, starts, out, sums, stats,
    q_t, q_h, kv_block, table_row, begin, room, is_last, scale,
    HEADS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, NOPE: tl.constexpr,
    VALUE: tl.constexpr, NOPE_WIDTH: tl.constexpr, ROPE_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, PAGE: tl.constexpr, BM: tl.constexpr, TILE: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Attend BM queries of one head to the expanded keys from `begin` on, at most `room`. Grid:
    (query tiles, HEADS, sequences).

    q is [tokens, HEADS, NOPE + ROPE] with strides; expanded as in expand_latents, rotated keys in
    kv. Between parts rows are in sums, float32 [tokens, HEADS, VALUE], before normalisation, and
    stats [tokens, HEADS, 2], maximum and sum. The last part writes out [tokens, HEADS, VALUE].
    """
    PRECISION: tl.constexpr = "ieee" if q.dtype.element_ty == tl.float32 else "tf32"
    BOTH: tl.constexpr = NOPE + VALUE
    seq = tl.program_id(2)
    head = tl.program_id(1)
    first = tl.load(starts + seq)
    queries = tl.load(starts + seq + 1) - first
    length = tl.load(lengths + seq)
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    if (tl.program_id(0) * BM < queries) & ((begin < length) | (is_last != 0)):
        inside = row < queries
        token = (first + row).to(tl.int64)
        position = length - queries + row
        nope_col = tl.arange(0, NOPE_WIDTH)
        rope_col = tl.arange(0, ROPE_WIDTH)
        value_col = tl.arange(0, VALUE_WIDTH)
        in_nope = nope_col < NOPE
        in_rope = rope_col < ROPE
        in_value = value_col < VALUE
        at = q + token[:, None] * q_t + head * q_h
        nopes = tl.load(at + nope_col[None, :], mask=inside[:, None] & in_nope[None, :], other=0.0)
        ropes = tl.load(
            at + NOPE + rope_col[None, :], mask=inside[:, None] & in_rope[None, :], other=0.0
        )
        top = tl.full([BM], -1e30, tl.float32)
        total = tl.zeros([BM], tl.float32)
        acc = tl.zeros([BM, VALUE_WIDTH], tl.float32)
        place = token * HEADS + head
        kept = inside[:, None] & in_value[None, :]
        held_at = sums + place[:, None] * VALUE + value_col[None, :]
        if (begin > 0) & (length > 0):  # else no part was stored
            top = tl.load(stats + place * 2, mask=inside, other=-1e30)
            total = tl.load(stats + place * 2 + 1, mask=inside, other=0.0)
            acc = tl.load(held_at, mask=kept, other=0.0)
        last = length - queries + tl.minimum(tl.program_id(0) * BM + BM, queries)
        end = tl.minimum(last - begin, room)
        table = tables + seq.to(tl.int64) * table_row
        in_tile = tl.arange(0, TILE)
        for j in tl.range(0, tl.cdiv(tl.maximum(end, 0), TILE), num_stages=STAGES):
            start = begin + j * TILE
            key = start + in_tile
            page = kv + tl.load(table + start // PAGE).to(tl.int64) * kv_block
            rows = page + (start % PAGE + in_tile)[:, None] * (RANK + ROPE) + RANK
            held = (key < length)[:, None]
            r = tl.load(rows + rope_col[None, :], mask=held & in_rope[None, :], other=0.0)
            made = ((seq.to(tl.int64) * room + j * TILE + in_tile) * HEADS + head) * BOTH
            both = expanded + made[:, None]
            k = tl.load(both + nope_col[None, :], mask=held & in_nope[None, :], other=0.0)
            v = tl.load(both + NOPE + value_col[None, :], mask=held & in_value[None, :], other=0.0)
            s = tl.dot(nopes, tl.trans(k), input_precision=PRECISION)
            s += tl.dot(ropes, tl.trans(r), input_precision=PRECISION)
            s = tl.where(key[None, :] <= position[:, None], s * scale, -float("inf"))
            new = tl.maximum(top, tl.max(s, 1))
            p = tl.exp2(s - new[:, None])
            old = tl.exp2(top - new)
            total = total * old + tl.sum(p, 1)
            acc = acc * old[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
            top = new
        if is_last:
            found = acc / tl.where(total > 0.0, total, 1.0)[:, None]
            to = out + place[:, None] * VALUE + value_col[None, :]
            tl.store(to, found.to(out.dtype.element_ty), mask=kept)
        else:
            tl.store(held_at, acc, mask=kept)
            tl.store(stats + place * 2, top, mask=inside)
            tl.store(stats + place * 2 + 1, total, mask=inside)
