"""Jit code of bidirectional attention: FlashAttention-2 (Dao 2023) over concatenated sequences.

Whole tiles of keys in a pipelined loop without a mask, then the last, which may be short.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _attend(
    acc, top, total, queries, k, v, k_t, v_t, first, last, length, scale,
    D: tl.constexpr, WIDTH: tl.constexpr, BN: tl.constexpr, MASK: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend to tiles first..last of BN keys each; k and v point at the sequence's first token, one
    head."""
    cols = tl.arange(0, WIDTH)
    in_tile = tl.arange(0, BN)
    for j in tl.range(first, last, num_stages=STAGES):
        key = (j * BN + in_tile).to(tl.int64)
        there = key < length
        keep = cols < D
        if MASK:
            inside = there[None, :] & keep[:, None]
            keys = tl.load(k + key[None, :] * k_t + cols[:, None], mask=inside, other=0.0)
        else:
            keys = tl.load(k + key[None, :] * k_t + cols[:, None], mask=keep[:, None], other=0.0)
        s = tl.dot(queries, keys, input_precision=PRECISION) * scale
        if MASK:
            s = tl.where(there[None, :], s, -1e30)
        new = tl.maximum(top, tl.max(s, 1))
        p = tl.exp2(s - new[:, None])
        old = tl.exp2(top - new)
        total = total * old + tl.sum(p, 1)
        if MASK:
            inside = there[:, None] & keep[None, :]
            values = tl.load(v + key[:, None] * v_t + cols[None, :], mask=inside, other=0.0)
        else:
            values = tl.load(v + key[:, None] * v_t + cols[None, :], mask=keep[None, :], other=0.0)
        acc = acc * old[:, None] + tl.dot(p.to(values.dtype), values, input_precision=PRECISION)
        top = new
    return acc, top, total


@triton.jit
def attend_tiles(
    q, k, v, tiles, out, q_t, q_h, k_t, k_h, v_t, v_h, scale,
    HEADS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, STAGES: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Attend one tile of BM queries of one head. Grid: (tiles, HEADS).

    q, k, v [tokens, HEADS, D] with strides of token and head; tiles int32 [tiles, 3]: first token
    and length of the sequence, and the tile's first query in it, after the end if unused; out
    [tokens, HEADS, D] dense. WIDTH >= D, a power of two. scale carries log2(e). EXACT does not
    round float32.
    """
    PRECISION: tl.constexpr = "ieee" if EXACT else "tf32"
    head = tl.program_id(1)
    tile = tiles + tl.program_id(0) * 3
    start = tl.load(tile)
    length = tl.load(tile + 1)
    first = tl.load(tile + 2)
    if first < length:
        row = first + tl.arange(0, BM)
        cols = tl.arange(0, WIDTH)
        token = (start + row).to(tl.int64)
        inside = (row < length)[:, None] & (cols < D)[None, :]
        queries = tl.load(
            q + token[:, None] * q_t + head * q_h + cols[None, :], mask=inside, other=0.0
        )
        keys = k + start.to(tl.int64) * k_t + head * k_h
        values = v + start.to(tl.int64) * v_t + head * v_h
        top = tl.full([BM], -1e30, tl.float32)
        total = tl.zeros([BM], tl.float32)
        acc = tl.zeros([BM, WIDTH], tl.float32)
        whole = length // BN
        acc, top, total = _attend(
            acc, top, total, queries, keys, values, k_t, v_t, 0, whole, length, scale,
            D, WIDTH, BN, False, STAGES, PRECISION,
        )  # fmt: skip
        acc, top, total = _attend(
            acc, top, total, queries, keys, values, k_t, v_t, whole, tl.cdiv(length, BN), length,
            scale, D, WIDTH, BN, True, STAGES, PRECISION,
        )  # fmt: skip
        tl.store(
            out + (token * HEADS + head)[:, None] * D + cols[None, :],
            (acc / total[:, None]).to(out.dtype.element_ty),
            mask=inside,
        )
