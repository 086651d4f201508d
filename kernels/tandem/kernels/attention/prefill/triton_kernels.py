"""Jit code of paged prefill attention for any GPU: FlashAttention-2 (Dao 2023), a program a (tile,
head).

Unmasked key tiles in a pipelined loop, then those on the diagonal.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _attend(
    acc, top, total, queries, kv, table, position, length, first, last, kv_block, kv_two, scale,
    D: tl.constexpr, PAGE: tl.constexpr, BN: tl.constexpr, MASK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Attend to key tiles first..last of BN tokens each, BN dividing the page. float32 is not
    rounded."""
    PRECISION: tl.constexpr = "ieee" if kv.dtype.element_ty == tl.float32 else "tf32"
    cols = tl.arange(0, D)
    in_tile = tl.arange(0, BN)
    for j in tl.range(first, last, num_stages=STAGES):
        block = tl.load(table + j * BN // PAGE).to(tl.int64)
        base = kv + block * kv_block + (j * BN % PAGE) * D
        k = tl.load(base + in_tile[None, :] * D + cols[:, None])
        s = tl.dot(queries, k, input_precision=PRECISION) * scale
        key = j * BN + in_tile
        if MASK:
            s = tl.where(key[None, :] <= position[:, None], s, -1e30)
        new = tl.maximum(top, tl.max(s, 1))
        p = tl.exp2(s - new[:, None])
        old = tl.exp2(top - new)
        total = total * old + tl.sum(p, 1)
        if MASK:  # a page's tail may hold anything, and 0 x NaN is NaN
            v = tl.load(
                base + kv_two + in_tile[:, None] * D + cols[None, :],
                mask=(key < length)[:, None],
                other=0.0,
            )
        else:
            v = tl.load(base + kv_two + in_tile[:, None] * D + cols[None, :])
        acc = acc * old[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
        top = new
    return acc, top, total


@triton.jit(do_not_specialize=["tables", "table_row"])
def prefill_tiles(
    q, kv, tables, plan, count, out, q_t, q_h, kv_block, kv_two, kv_head, table_row, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """Attend one tile of BM query rows of one head. Grid: (HEADS, most tiles).

    q [tokens, HEADS, D] with strides q_t, q_h; kv [blocks, K|V, KV heads, PAGE, D] with strides
    kv_block, kv_two, kv_head and dense pages; plan by plan_tiles; out [tokens, HEADS, D] dense.
    scale carries log2(e).
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
        cols = tl.arange(0, D)
        token = (q_row + row).to(tl.int64)
        queries = tl.load(
            q + token[:, None] * q_t + head * q_h + cols[None, :],
            mask=(row < rows)[:, None],
            other=0.0,
        )
        pages = kv + (head // GROUP).to(tl.int64) * kv_head
        position = first_position + row
        top = tl.full([BM], -1e30, tl.float32)
        total = tl.zeros([BM], tl.float32)
        acc = tl.zeros([BM, D], tl.float32)
        end = tl.cdiv(keys, BN)
        whole = tl.minimum((first_position + 1) // BN, end)
        acc, top, total = _attend(
            acc, top, total, queries, pages, table, position, length, 0, whole, kv_block, kv_two,
            scale, D, PAGE, BN, False, STAGES,
        )  # fmt: skip
        acc, top, total = _attend(
            acc, top, total, queries, pages, table, position, length, whole, end, kv_block, kv_two,
            scale, D, PAGE, BN, True, STAGES,
        )  # fmt: skip
        tl.store(
            out + (token * HEADS + head)[:, None] * D + cols[None, :],
            (acc / total[:, None]).to(out.dtype.element_ty),
            mask=(row < rows)[:, None],
        )
