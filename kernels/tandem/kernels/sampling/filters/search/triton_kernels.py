"""Jit code that searches a row's candidates for the threshold, a program a row.

Many candidates are cut down by pivots, at most a block of them is weighed each against all. Called
for what `gather_rows` left.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tandem.kernels.launch.triton_kernels import follow
from tandem.kernels.sampling.filters.triton_kernels import (
    COUNT,
    FIELDS,
    NOTHING,
    PARTS,
    TINY,
    bracket,
)


@triton.jit
def _weigh(value, keep, top, BY_MASS: tl.constexpr):
    if BY_MASS:
        return tl.where(keep, tl.exp(value - top), 0.0)
    else:  # noqa: RET505 - a branch of constants: only one is compiled
        return tl.where(keep, 1.0, 0.0)


@triton.jit
def _sum_above(values, count, floor, top, BLOCK: tl.constexpr):
    """Mass of values[:count] that are at or above floor, and their smallest."""
    total = tl.zeros([BLOCK], tl.float32)
    least = tl.full([BLOCK], float("inf"), tl.float32)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(values + at, mask=at < count, other=float("-inf"))
        keep = (value >= floor) & (value > float("-inf"))
        total += tl.where(keep, tl.exp(value - top), 0.0)
        least = tl.minimum(least, tl.where(keep, value, float("inf")))
    return tl.sum(total, 0), tl.min(least, 0)


@triton.jit
def _keep_between(values, target, count, low, high, BLOCK: tl.constexpr):
    """Copy values[:count] in low <= v < high to `target`, which may be `values`; their number.

    In place a block is read before anything is written at or before its place.
    """
    kept = tl.zeros([], tl.int32)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(values + at, mask=at < count, other=float("-inf"))
        keep = (value >= low) & (value < high)
        order = tl.cumsum(keep.to(tl.int32), 0)
        tl.debug_barrier()
        tl.store(target + kept + order - 1, value, mask=keep)
        kept += tl.max(order, 0)
    tl.debug_barrier()
    return kept


@triton.jit
def _narrow(
    values, count, low, high, above, top, target,
    BY_MASS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One pass over values[:count] that cuts the bracket of `_search` into PARTS; the right one."""
    step = (high - low) / PARTS
    sums = ()
    for _ in tl.static_range(PARTS - 1):
        sums = sums + (tl.zeros([BLOCK], tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(values + at, mask=at < count, other=float("-inf"))
        weight = _weigh(value, (value >= low) & (value < high), top, BY_MASS)
        more = ()
        for i in tl.static_range(PARTS - 1):
            pivot = low + step * (i + 1)
            more = more + (sums[i] + tl.where(value >= pivot, weight, 0.0),)  # type: ignore[assignment]  # noqa: RUF005
        sums = more
    new_low = low
    new_high = high
    new_above = above
    for i in tl.static_range(PARTS - 1):
        pivot = low + step * (PARTS - 1 - i)
        reached = above + tl.sum(sums[PARTS - 2 - i], 0)
        # Pivots come from above: the first that reaches the target is the new lower end.
        searching = new_low == low
        enough = (reached >= target) & (pivot < high)
        new_low = tl.where(searching & enough, tl.maximum(pivot, low), new_low)
        lower = searching & (reached < target) & (pivot > low) & (pivot < new_high)
        new_high = tl.where(lower, pivot, new_high)
        new_above = tl.where(lower, reached, new_above)
    return new_low, new_high, new_above


@triton.jit
def _by_rank(
    values, count, low, high, above, top, target,
    BY_MASS: tl.constexpr, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """`_search` where values[:count] are at most BLOCK: each is weighed against all the others."""
    at = tl.arange(0, BLOCK)
    value = tl.load(values + at, mask=at < count, other=float("-inf"))
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, count, AT_ONCE):
        place = start + tl.arange(0, AT_ONCE)
        other = tl.load(values + place, mask=place < count, other=float("-inf"))
        weight = _weigh(other, (other >= low) & (other < high), top, BY_MASS)
        sums += tl.sum(tl.where(other[None, :] >= value[:, None], weight[None, :], 0.0), 1)
    fits = (value >= low) & (value < high) & (above + sums >= target)
    return tl.max(tl.where(fits, value, low), 0)


@triton.jit
def _search(
    values, spare, count, low, high, above, top, target,
    BY_MASS: tl.constexpr, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The largest v of values[:count] in low <= v < high whose weights from v up reach `target`.

    `above` is the weight of what is at or above `high`; with all that is at or above `low` it must
    reach the target. While there is more than a block of values the bracket is cut and what is
    outside is left behind. That also ends when no float lies within the bracket but its lower end:
    then all that is left is equal.
    """
    moved = low < high
    while moved & (count > BLOCK):
        new_low, new_high, above = _narrow(
            values, count, low, high, above, top, target, BY_MASS, WIDE
        )
        moved = (new_low > low) | (new_high < high)
        low = new_low
        high = new_high
        count = _keep_between(values, spare, count, low, high, WIDE)
        values = spare
    if count <= BLOCK:
        low = _by_rank(values, count, low, high, above, top, target, BY_MASS, BLOCK, AT_ONCE)
    return low


@triton.jit(do_not_specialize=["cursors"])
def search_rows(
    top_k, top_p, floors, facts, kinds, partials, cursors, found, vocab, chunks,
    BLOCK: tl.constexpr, AT_ONCE: tl.constexpr, WIDE: tl.constexpr, ROUNDS: tl.constexpr,
    CHUNKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """floors[row] becomes the row's threshold under min-p, top-k and top-p. Grid: (rows,)."""
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    kind = tl.load(kinds + row)
    count = tl.load(cursors + row)
    if (kind != NOTHING) & (count > 0):
        low, high, above, target = bracket(
            facts, kinds, top_p, partials, row, chunks, ROUNDS, ROUNDS, CHUNKS
        )
        k = tl.load(top_k + row)
        p = tl.load(top_p + row)
        floor = tl.load(floors + row)
        top = tl.load(facts + row * FIELDS + 1)
        values = found + row * 2 * vocab
        spare = values + vocab
        if low == float("-inf"):
            _mass, low = _sum_above(values, count, low, top, WIDE)
        if (kind == COUNT) & (count >= k):
            many = k.to(tl.float32)
            kth = _search(
                values, spare, count, low, high, above, top, many, False, BLOCK, AT_ONCE, WIDE
            )
            floor = tl.maximum(floor, kth)
        if p < 1.0:
            if kind == COUNT:
                mass, least = _sum_above(values, count, floor, top, WIDE)
                target = tl.maximum(p * mass, TINY)
                low = tl.maximum(low, least)
            edge = _search(
                values, spare, count, low, high, above, top, target, True, BLOCK, AT_ONCE, WIDE
            )
            floor = tl.maximum(floor, edge)
        tl.store(floors + row, floor)
