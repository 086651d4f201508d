"""Jit code of paged prefill attention for any GPU: FlashAttention-2 (Dao 2023), a program a (tile,
head).

Unmasked key tiles in a pipelined loop, then those on the diagonal. With a window, tiles at its
start come first, masked.
"""

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


@triton.jit
def _attend(
    acc, top, total, queries, kv, table, position, length, lowest, first, last, kv_block, kv_two,
    scale, cap, slope,
    D: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, BN: tl.constexpr,
    WINDOW: tl.constexpr, MASK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Attend to key tiles first..last of BN tokens each, BN dividing the page; no row attends to
    keys before `lowest`. float32 is not rounded."""
    PRECISION: tl.constexpr = "ieee" if queries.dtype == tl.float32 else "tf32"
    cols = tl.arange(0, WIDTH)
    in_tile = tl.arange(0, BN)
    for j in tl.range(first, last, num_stages=STAGES):
        block = tl.load(table + j * BN // PAGE).to(tl.int64)
        base = kv + block * kv_block + (j * BN % PAGE) * D
        at = base + in_tile[None, :] * D + cols[:, None]
        k = in_type(load_heads(at, (cols < D)[:, None], D, WIDTH), queries.dtype)
        products = tl.dot(queries, k, input_precision=PRECISION)
        key = j * BN + in_tile
        s = score(products, key, position, scale, cap, slope)
        if MASK:
            visible = key[None, :] <= position[:, None]
            if WINDOW:
                visible = visible & (key[None, :] > position[:, None] - WINDOW)
            s = tl.where(visible, s, -1e30)
        new = tl.maximum(top, tl.max(s, 1))
        # A row without keys so far has wrong sums, which its own key multiplies by 0 later.
        p = tl.exp2(s - new[:, None])
        old = tl.exp2(top - new)
        total = total * old + tl.sum(p, 1)
        at = base + kv_two + in_tile[:, None] * D + cols[None, :]
        if MASK:  # a page's unused rows may hold anything, and 0 x NaN is NaN
            held = key < length
            if WINDOW:
                held = held & (key >= lowest)
            v = tl.load(at, mask=mask_heads(held, cols, D, WIDTH), other=0.0)
        else:
            v = load_heads(at, (cols < D)[None, :], D, WIDTH)
        v = in_type(v, queries.dtype)
        acc = acc * old[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
        top = new
    return acc, top, total


@triton.jit(do_not_specialize=["tables", "table_row"])
def prefill_tiles(
    q, kv, tables, plan, count, out, q_t, q_h, kv_block, kv_two, kv_head, table_row, scale,
    cap, sinks, slopes, kv_scales,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    PAGE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, WINDOW: tl.constexpr,
    STAGES: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """Attend one tile of BM query rows of one head. Grid: (HEADS, most tiles).

    q [tokens, HEADS, D] with strides q_t, q_h; kv [blocks, K|V, KV heads, PAGE, D] with strides
    kv_block, kv_two, kv_head and dense pages; plan by plan_tiles; out [tokens, HEADS, D] dense.
    scale and cap are those of Scores.in_log2; cap, sinks and slopes may be None, WINDOW 0. With
    kv_scales [2, KV heads] pages hold codes, which are multiplied in the type of q. WIDTH is the
    power of two that holds D.
    """
    if tl.program_id(1) < tl.load(count):
        head = tl.program_id(0)
        mine = plan + tl.program_id(1) * FIELDS
        q_row = tl.load(mine)
        rows = tl.load(mine + 1)
        first_position = tl.load(mine + 2)
        keys = tl.load(mine + 3)
        length = tl.load(mine + 4)
        table = tables + tl.load(mine + 5).to(tl.int64) * table_row
        row = tl.arange(0, BM)
        cols = tl.arange(0, WIDTH)
        token = (q_row + row).to(tl.int64)
        inside = mask_heads(row < rows, cols, D, WIDTH)
        queries = tl.load(
            q + token[:, None] * q_t + head * q_h + cols[None, :], mask=inside, other=0.0
        )
        pages = kv + (head // GROUP).to(tl.int64) * kv_head
        position = first_position + row
        top = tl.full([BM], -1e30, tl.float32)
        total = tl.zeros([BM], tl.float32)
        acc = tl.zeros([BM, WIDTH], tl.float32)
        if sinks is not None:  # a first key without a value
            top = tl.zeros([BM], tl.float32) + tl.load(sinks + head) * LOG2E
            total = tl.full([BM], 1.0, tl.float32)
        if kv_scales is not None:
            scale *= tl.load(kv_scales + head // GROUP)
        slope = None
        if slopes is not None:
            slope = tl.zeros([BM], tl.float32) + tl.load(slopes + head) * LOG2E
        end = tl.cdiv(keys, BN)
        whole = tl.minimum((first_position + 1) // BN, end)
        lowest = 0
        begin = 0
        if WINDOW:
            lowest = tl.maximum(first_position - WINDOW + 1, 0)
            begin = tl.minimum(tl.cdiv(tl.maximum(keys - WINDOW, 0), BN), whole)
            acc, top, total = _attend(
                acc, top, total, queries, pages, table, position, length, lowest, lowest // BN,
                begin, kv_block, kv_two, scale, cap, slope, D, WIDTH, PAGE, BN, WINDOW, True,
                STAGES,
            )  # fmt: skip
        acc, top, total = _attend(
            acc, top, total, queries, pages, table, position, length, lowest, begin, whole,
            kv_block, kv_two, scale, cap, slope, D, WIDTH, PAGE, BN, WINDOW, False, STAGES,
        )  # fmt: skip
        acc, top, total = _attend(
            acc, top, total, queries, pages, table, position, length, lowest, whole, end,
            kv_block, kv_two, scale, cap, slope, D, WIDTH, PAGE, BN, WINDOW, True, STAGES,
        )  # fmt: skip
        found = acc / total[:, None]
        if kv_scales is not None:
            found *= tl.load(kv_scales + HEADS // GROUP + head // GROUP)
        tl.store(
            out + (token * HEADS + head)[:, None] * D + cols[None, :],
            found.to(out.dtype.element_ty),
            mask=inside,
        )
