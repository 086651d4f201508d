"""Jit code that finds the thresholds of min-p, top-k and top-p by search instead of a sort.

Four steps over what `group_stats` left: `bound_rows` finds from the groups' peaks alone a value
that the threshold cannot be below; `gather_rows` copies the logits above it, a few hundred where
the distribution is peaked; `search_rows` narrows a bracket around the threshold by pivots. Weights
are 1 for top-k and probability for top-p: either way the threshold is the largest logit v such that
the weights of all logits >= v sum up to a target. (The search by pivots instead of a sort is
FlashInfer's idea, 2025; the bound by peaks and the bracket are this project's.)
"""

from __future__ import annotations

import triton
import triton.language as tl

from tandem.kernels.launch.triton_kernels import follow
from tandem.kernels.sampling.race.triton_kernels import load_kept

TINY = tl.constexpr(1e-30)
HALVINGS = tl.constexpr(16)
"""Steps of `bound_rows`: the bound is within 2^-16 of the row's range of the best such bound."""


@triton.jit
def bound_rows(
    peaks, masses, min_p, top_k, top_p, floors, bounds, sums, cursors, vocab, groups,
    GROUPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Per row: min-p's floor, a bound of the threshold, peak and mass. Grid: (rows,).

    At least as many logits are above a value as groups have their peak above it, and likewise for
    mass. floors, bounds float32 [rows]; sums float32 [rows, 2]; cursors int32 [rows], zeroed.
    """
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)
    real = group < groups
    peak = tl.load(peaks + row * groups + group, mask=real, other=float("-inf"))
    mass = tl.load(masses + row * groups + group, mask=real, other=0.0)
    share = tl.load(min_p + row)
    k = tl.load(top_k + row)
    p = tl.load(top_p + row)
    top = tl.max(peak, 0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    likely = tl.exp(peak - shift)
    total = tl.sum(mass * likely, 0)
    share64 = tl.where(share > 0, share, 1.0).to(tl.float64)
    floor = tl.minimum(top + tl.log(share64).to(tl.float32), top)
    floor = tl.where(share > 0, floor, float("-inf"))
    by_count = (k > 0) & (k < vocab)
    some = peak > float("-inf")
    weight = tl.where(some, tl.where(by_count, 1.0, likely), 0.0)
    # A little more than asked for, so that rounding cannot put the bound above the threshold.
    target = tl.where(by_count, k.to(tl.float32), p * total * 1.0001)
    high = tl.maximum(top, -3.4028234663852886e38)
    low = tl.min(tl.where(some, peak, high), 0)
    enough = tl.sum(weight, 0) >= target
    for _ in range(HALVINGS):
        middle = low + (high - low) * 0.5
        fits = tl.sum(tl.where(peak >= middle, weight, 0.0), 0) >= target
        low = tl.where(fits, middle, low)
        high = tl.where(fits, high, middle)
    bound = tl.maximum(tl.where(enough, low, float("-inf")), floor)
    # After min-p alone the nucleus is a share of all that is above the floor: all of it is needed.
    bound = tl.where((share > 0) & (by_count == 0), floor, bound)
    tl.store(floors + row, floor)
    tl.store(bounds + row, bound)
    tl.store(sums + row * 2, top)
    tl.store(sums + row * 2 + 1, total)
    tl.store(cursors + row, 0)


@triton.jit
def gather_rows(
    logits, temperature, peaks, top_k, top_p, bounds, cursors, found, row_stride, vocab, groups,
    GROUP: tl.constexpr, AT_ONCE: tl.constexpr, SCALED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Copy the row's finite logits at or above its bound to found[row]; any order.

    found float32 [rows, 2, vocab], of which the first half is filled; cursors count. Rows without
    top-k and top-p need none. Grid: (cdiv(groups, AT_ONCE), rows).
    """
    follow(PDL)
    row = tl.program_id(1).to(tl.int64)
    k = tl.load(top_k + row)
    if ((k > 0) & (k < vocab)) | (tl.load(top_p + row) < 1.0):
        group = tl.program_id(0) * AT_ONCE + tl.arange(0, AT_ONCE)
        bound = tl.load(bounds + row)
        peak = tl.load(peaks + row * groups + group, mask=group < groups, other=float("-inf"))
        if (tl.max(peak, 0) >= bound) & (tl.max(peak, 0) > float("-inf")):
            at = tl.program_id(0) * AT_ONCE * GROUP + tl.arange(0, AT_ONCE * GROUP)
            logits += row * row_stride
            value = load_kept(logits, at, at < vocab, temperature, bounds, row, SCALED, False)
            keep = (value >= bound) & (value > float("-inf"))
            order = tl.cumsum(keep.to(tl.int32), 0)
            first = tl.atomic_add(cursors + row, tl.max(order, 0), sem="relaxed")
            tl.store(found + row * 2 * vocab + first + order - 1, value, mask=keep)


@triton.jit
def _weigh(value, keep, top, BY_MASS: tl.constexpr):
    if BY_MASS:
        return tl.where(keep, tl.exp(value - top), 0.0)
    else:  # noqa: RET505 - a branch of constants: only one is compiled
        return tl.where(keep, 1.0, 0.0)


@triton.jit
def _sum_above(values, count, floor, top, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Sum of weights of values[:count] that are at or above floor, and their smallest."""
    total = tl.zeros([BLOCK], tl.float32)
    least = tl.full([BLOCK], float("inf"), tl.float32)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(values + at, mask=at < count, other=float("-inf"))
        keep = (value >= floor) & (value > float("-inf"))
        total += _weigh(value, keep, top, BY_MASS)
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
def _search(
    values, spare, count, low, high, top, target,
    BY_MASS: tl.constexpr, BLOCK: tl.constexpr, PIVOTS: tl.constexpr,
):  # fmt: skip
    """The largest v of values[:count] in low <= v < high whose weights from v up reach `target`.

    All of values[:count] that are at or above `low` must reach it, those at or above `high` have no
    weight. Each pass cuts the bracket into PIVOTS + 1; what is outside is left behind while there
    is more than a block of values. Ends when no float lies within the bracket but its lower end.
    """
    above = 0.0
    moved = low < high
    while moved:
        step = (high - low) / (PIVOTS + 1)
        sums = ()
        for _ in tl.static_range(PIVOTS):
            sums = sums + (tl.zeros([BLOCK], tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
        for start in range(0, count, BLOCK):
            at = start + tl.arange(0, BLOCK)
            value = tl.load(values + at, mask=at < count, other=float("-inf"))
            weight = _weigh(value, (value >= low) & (value < high), top, BY_MASS)
            more = ()
            for i in tl.static_range(PIVOTS):
                pivot = low + step * (i + 1)
                more = more + (sums[i] + tl.where(value >= pivot, weight, 0.0),)  # type: ignore[assignment]  # noqa: RUF005
            sums = more
        new_low = low
        new_high = high
        new_above = above
        for i in tl.static_range(PIVOTS):
            pivot = low + step * (PIVOTS - i)
            reached = above + tl.sum(sums[PIVOTS - 1 - i], 0)
            # Pivots come from above: the first that reaches the target is the new lower end.
            searching = new_low == low
            enough = (reached >= target) & (pivot < high)
            new_low = tl.where(searching & enough, tl.maximum(pivot, low), new_low)
            lower = searching & (reached < target) & (pivot > low) & (pivot < new_high)
            new_high = tl.where(lower, pivot, new_high)
            new_above = tl.where(lower, reached, new_above)
        moved = (new_low > low) | (new_high < high)
        low = new_low
        high = new_high
        above = new_above
        if moved & (count > BLOCK):
            count = _keep_between(values, spare, count, low, high, BLOCK)
            values = spare
    return low


@triton.jit
def search_rows(
    top_k, top_p, floors, bounds, sums, cursors, found, vocab,
    BLOCK: tl.constexpr, PIVOTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """floors[row] becomes the row's threshold under min-p, top-k and top-p. Grid: (rows,)."""
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    k = tl.load(top_k + row)
    p = tl.load(top_p + row)
    floor = tl.load(floors + row)
    bound = tl.load(bounds + row)
    top = tl.load(sums + row * 2)
    count = tl.load(cursors + row)
    by_count = (k > 0) & (k < vocab)
    if (by_count | (p < 1.0)) & (count > 0):
        values = found + row * 2 * vocab
        spare = values + vocab
        beyond = top + tl.maximum(tl.abs(top) * 2.4e-7, TINY)
        if by_count & (count >= k):
            _, least = _sum_above(values, count, bound, top, False, BLOCK)
            kth = _search(
                values, spare, count, least, beyond, top, k.to(tl.float32), False, BLOCK, PIVOTS
            )
            floor = tl.maximum(floor, kth)
        if p < 1.0:
            mass, least = _sum_above(values, count, tl.maximum(floor, bound), top, True, BLOCK)
            whole = by_count | (floor > float("-inf"))
            total = tl.where(whole, mass, tl.load(sums + row * 2 + 1))
            target = tl.maximum(p * total, TINY)
            if mass >= target:
                edge = _search(
                    values, spare, count, least, beyond, top, target, True, BLOCK, PIVOTS
                )
                floor = tl.maximum(floor, edge)
        tl.store(floors + row, floor)
