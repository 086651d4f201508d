"""Jit code of a mixture of experts: routing, sort, grouped products, sum."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def route_rows(
    logits, bias, ids, weights, row_stride, groups, size, scale,
    CHOSEN: tl.constexpr, CHOSEN_GROUPS: tl.constexpr, PLACES: tl.constexpr,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, SCORING: tl.constexpr, NORMALIZED: tl.constexpr,
    GROUPED: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Choose CHOSEN of groups * size experts for a token. Grid: (tokens,).

    logits float32 [tokens, experts] with a row stride; bias float32 [experts]; ids and weights
    dense [tokens, CHOSEN]. SCORING: 0 softmax, 1 sigmoid, 2 softmax of the chosen. GROUPS and SIZE
    are powers of two, as is PLACES, at least CHOSEN.
    """
    row = tl.program_id(0).to(tl.int64)
    group, member = tl.arange(0, GROUPS), tl.arange(0, SIZE)
    number = group[:, None] * size + member[None, :]
    keep = (group < groups)[:, None] & (member < size)[None, :]
    low = float("-inf")
    scores = tl.load(logits + row * row_stride + number, mask=keep, other=low)
    if SCORING == 0:
        powers = tl.exp(scores - tl.max(tl.max(scores, 1), 0))
        scores = powers / tl.sum(tl.sum(powers, 1), 0)
    if SCORING == 1:
        scores = 1.0 / (1.0 + tl.exp(-scores))
    ranked = scores
    if BIAS:
        ranked += tl.load(bias + number, mask=keep, other=0.0)
    ranked = tl.where(keep, ranked, low)
    if GROUPED:
        best = tl.max(ranked, 1)
        if BIAS and SIZE > 1:
            first = tl.argmax(ranked, 1)
            second = tl.max(tl.where(member[None, :] == first[:, None], low, ranked), 1)
            best += second
        best = tl.where(group < groups, best, low)
        allowed = tl.zeros((GROUPS,), tl.int32)
        for _ in tl.static_range(CHOSEN_GROUPS):
            found = tl.argmax(best, 0)
            allowed = tl.where(group == found, 1, allowed)
            best = tl.where(group == found, low, best)
        ranked = tl.where(allowed[:, None] > 0, ranked, low)
    flat = tl.reshape(ranked, (GROUPS * SIZE,))
    numbers = tl.reshape(number + tl.zeros((GROUPS, SIZE), tl.int32), (GROUPS * SIZE,))
    own = tl.reshape(scores, (GROUPS * SIZE,))
    lane, place = tl.arange(0, GROUPS * SIZE), tl.arange(0, PLACES)
    chosen = tl.zeros((PLACES,), tl.float32) + low
    for at in tl.static_range(CHOSEN):
        best_lane = tl.argmax(flat, 0)
        one = lane == best_lane
        expert = tl.minimum(tl.sum(tl.where(one, numbers, 0), 0), groups * size - 1)
        tl.store(ids + row * CHOSEN + at, expert)
        chosen = tl.where(place == at, tl.sum(tl.where(one, own, 0.0), 0), chosen)
        flat = tl.where(one, low, flat)
    if SCORING == 2:
        chosen = tl.exp(chosen - tl.max(chosen, 0))
        chosen = chosen / tl.sum(chosen, 0)
    if NORMALIZED:
        chosen = chosen / (tl.sum(tl.where(place < CHOSEN, chosen, 0.0), 0) + 1e-20)
    tl.store(weights + row * CHOSEN + place, chosen * scale, mask=place < CHOSEN)


@triton.jit(do_not_specialize=["count"])
def place_routes(ids, routes, starts, count, experts, BLOCK: tl.constexpr):
    """Place the routes of one expert after those of lower ones, in their order. Grid: (experts,).

    ids and routes int32 [count]; starts int32 [experts + 1].
    """
    expert = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    at = 0
    for first in range(0, count, BLOCK):
        each = tl.load(ids + first + lane, mask=first + lane < count, other=experts)
        at += tl.sum((each < expert).to(tl.int32), 0)
    tl.store(starts + expert, at)
    tl.store(starts + experts, count, mask=expert == experts - 1)
    for first in range(0, count, BLOCK):
        each = tl.load(ids + first + lane, mask=first + lane < count, other=experts)
        own = (each == expert).to(tl.int32)
        tl.store(routes + at + tl.cumsum(own, 0) - 1, first + lane, mask=own > 0)
        at += tl.sum(own, 0)


@triton.jit
def rows_of_tile(tile, starts, experts, BM: tl.constexpr, EXPERTS: tl.constexpr):
    """Return the expert of a tile of BM rows, its first row, and the end of the expert's rows. An
    unused tile has the expert ``experts``. EXPERTS is a power of two, at least ``experts``."""
    each = tl.arange(0, EXPERTS)
    first = tl.load(starts + each, mask=each < experts, other=0)
    end = tl.load(starts + each + 1, mask=each < experts, other=0)
    tiles = (end - first + BM - 1) // BM
    ends = tl.cumsum(tiles, 0)
    expert = tl.sum(((ends <= tile) & (each < experts)).to(tl.int32), 0)
    own = each == expert
    before = tl.sum(tl.where(own, ends - tiles, 0), 0)
    row = tl.sum(tl.where(own, first, 0), 0) + (tile - before) * BM
    return expert, row, tl.sum(tl.where(own, end, 0), 0)


@triton.jit
def multiply_gate_up(
    x, weight, scale, bias, routes, starts, out, experts, width, inner, x_row,
    CHOSEN: tl.constexpr, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EXPERTS: tl.constexpr,
    FP8: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Compute the activation of the first products. Grid: (tiles of width, tiles of rows).

    x [tokens, inner] with a row stride; weight dense [experts, halves * width, inner], with FP8
    codes with scale [experts, halves * blocks of width, blocks of inner]; bias dense [experts,
    halves * width]; out dense [rows, width], in the order of ``routes``. ACTIVATION: 0 SiLU, 1
    clamped, 2 squared ReLU, which alone has one half. With FP8 BK is a block, and BN divides it.
    """
    expert, first, end = rows_of_tile(tl.program_id(1), starts, experts, BM, EXPERTS)
    if expert == experts:
        return
    HALVES: tl.constexpr = 1 if ACTIVATION == 2 else 2
    m, n = first + tl.arange(0, BM), tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    keep_m, keep_n = m < end, n < width
    token = tl.load(routes + m, mask=keep_m, other=0) // CHOSEN
    x_at = x + token.to(tl.int64)[:, None] * x_row + k[None, :]
    of_expert = weight + expert.to(tl.int64) * HALVES * width * inner
    w_at = of_expert + n.to(tl.int64)[None, :] * inner + k[:, None]
    up_at = of_expert + (n.to(tl.int64) + (HALVES - 1) * width)[None, :] * inner + k[:, None]
    blocks, columns = tl.cdiv(width, BK), tl.cdiv(inner, BK)
    scale_at = scale + (expert * HALVES * blocks + tl.program_id(0) * BN // BK) * columns
    gate = tl.zeros((BM, BN), tl.float32)
    up = tl.zeros((BM, BN), tl.float32)
    for start in range(0, inner, BK):
        keep_k = start + k < inner
        a = tl.load(x_at, mask=keep_m[:, None] & keep_k[None, :], other=0.0)
        keep = keep_k[:, None] & keep_n[None, :]
        product = tl.dot(
            a, tl.load(up_at, mask=keep, other=0.0).to(a.dtype), input_precision="ieee"
        )
        if FP8:
            product *= tl.load(scale_at + (HALVES - 1) * blocks * columns)
        up += product
        if HALVES == 2:
            product = tl.dot(
                a, tl.load(w_at, mask=keep, other=0.0).to(a.dtype), input_precision="ieee"
            )
            if FP8:
                product *= tl.load(scale_at)
            gate += product
        x_at += BK
        w_at += BK
        up_at += BK
        scale_at += 1
    if BIAS:
        bias_at = bias + expert * HALVES * width + n
        gate += tl.load(bias_at, mask=keep_n, other=0.0).to(tl.float32)[None, :]
        bias_at += (HALVES - 1) * width
        up += tl.load(bias_at, mask=keep_n, other=0.0).to(tl.float32)[None, :]
    if ACTIVATION == 0:
        value = gate / (1.0 + tl.exp(-gate)) * up
    elif ACTIVATION == 1:
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        value = (up + 1.0) * (gate / (1.0 + tl.exp(-ALPHA * gate)))
    else:
        positive = tl.maximum(up, 0.0)
        value = positive * positive
    at = out + m.to(tl.int64)[:, None] * width + n[None, :]
    tl.store(at, value.to(out.dtype.element_ty), mask=keep_m[:, None] & keep_n[None, :])


@triton.jit
def multiply_down(
    x, weight, scale, bias, routes, starts, factors, out, experts, outputs, inner,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EXPERTS: tl.constexpr,
    FP8: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Compute the second products times the routes' weights. Grid: (tiles of outputs, tiles of
    rows).

    x dense [rows, inner], in the order of ``routes``; weight dense [experts, outputs, inner], with
    FP8 codes with scale [experts, blocks of outputs, blocks of inner]; bias dense [experts,
    outputs]; factors float32 [rows] and out dense float32 [rows, outputs], by route.
    """
    expert, first, end = rows_of_tile(tl.program_id(1), starts, experts, BM, EXPERTS)
    if expert == experts:
        return
    m, n = first + tl.arange(0, BM), tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    keep_m, keep_n = m < end, n < outputs
    x_at = x + m.to(tl.int64)[:, None] * inner + k[None, :]
    of_expert = weight + expert.to(tl.int64) * outputs * inner
    w_at = of_expert + n.to(tl.int64)[None, :] * inner + k[:, None]
    columns = tl.cdiv(inner, BK)
    scale_at = scale + (expert * tl.cdiv(outputs, BK) + tl.program_id(0) * BN // BK) * columns
    sums = tl.zeros((BM, BN), tl.float32)
    for start in range(0, inner, BK):
        keep_k = start + k < inner
        a = tl.load(x_at, mask=keep_m[:, None] & keep_k[None, :], other=0.0)
        w = tl.load(w_at, mask=keep_k[:, None] & keep_n[None, :], other=0.0)
        product = tl.dot(a, w.to(a.dtype), input_precision="ieee")
        if FP8:
            product *= tl.load(scale_at)
        sums += product
        x_at += BK
        w_at += BK
        scale_at += 1
    if BIAS:
        sums += tl.load(bias + expert * outputs + n, mask=keep_n, other=0.0).to(tl.float32)[None, :]
    row = tl.load(routes + m, mask=keep_m, other=0)
    sums *= tl.load(factors + row, mask=keep_m, other=0.0)[:, None]
    at = out + row.to(tl.int64)[:, None] * outputs + n[None, :]
    tl.store(at, sums, mask=keep_m[:, None] & keep_n[None, :])


@triton.jit
def add_routes(found, total, width, CHOSEN: tl.constexpr, BLOCK: tl.constexpr):
    """Add a token's CHOSEN rows in their order. Grid: (tokens, tiles of width).

    found float32 [tokens * CHOSEN, width] and total float32 [tokens, width] are dense.
    """
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    keep = n < width
    sums = tl.load(found + token * CHOSEN * width + n, mask=keep, other=0.0)
    for place in tl.static_range(1, CHOSEN):
        sums += tl.load(found + (token * CHOSEN + place) * width + n, mask=keep, other=0.0)
    tl.store(total + token * width + n, sums, mask=keep)
