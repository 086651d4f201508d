"""Jit code that finds the thresholds of min-p, top-k and top-p by search instead of a sort.

After `group_stats`, `bound_rows` finds a lower bound of the threshold from the groups' peaks and
masses; for top-p without top-k `weigh_rows` narrows the bracket up to the peak; `gather_rows`
copies the logits within it; `search_rows` ends the search among these. Weights are 1 for top-k and
probability for top-p: the threshold is the largest logit v such that the weights of all logits >= v
reach a target. (Pivots instead of a sort: FlashInfer, 2025.)
"""

from __future__ import annotations

import triton
import triton.language as tl

from tandem.kernels.launch.triton_kernels import follow
from tandem.kernels.sampling.race.triton_kernels import load_kept

TINY = tl.constexpr(1e-30)
FINITE = tl.constexpr(-3.4028234663852886e38)
PARTS = tl.constexpr(8)
"""Parts into which a pass cuts a bracket."""
HALVINGS = tl.constexpr(12)
"""Steps of `bound_rows`: the bound is within 2^-12 of the row's range of the best such bound."""
NOTHING = tl.constexpr(0)
COUNT = tl.constexpr(1)
MASS = tl.constexpr(2)
FLOOR_MASS = tl.constexpr(3)
"""Kinds of rows: no search, top-k (then perhaps top-p), top-p of all, top-p of what min-p keeps."""
FIELDS = tl.constexpr(4)
"""Fields of a row: lower end of the bracket, peak, mass (times e^-peak), upper end."""


# The offset of the cursors must not build another kernel.
@triton.jit(do_not_specialize=["cursors"])
def bound_rows(
    peaks, masses, min_p, top_k, top_p, floors, facts, kinds, cursors, vocab, groups,
    GROUPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Find per row: min-p's floor, the bracket, peak, mass and kind. Grid: (rows,).

    As many logits are above a value as groups have their peak above it, at least, and likewise for
    mass; logits below peak + log(share * mass / vocab) cannot have that share of the mass. floors
    float32 [rows]; facts float32 [rows, FIELDS]; kinds, cursors int32 [rows].
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
    likely = tl.exp(peak - tl.maximum(top, FINITE))
    total = tl.sum(mass * likely, 0)
    share64 = tl.where(share > 0, share, 1.0).to(tl.float64)
    floor = tl.minimum(top + tl.log(share64).to(tl.float32), top)
    floor = tl.where(share > 0, floor, float("-inf"))
    by_count = (k > 0) & (k < vocab)
    some = peak > float("-inf")
    weight = tl.where(some, tl.where(by_count, 1.0, likely), 0.0)
    # A margin, so that rounding cannot put the bound above the threshold.
    target = tl.where(by_count, k.to(tl.float32), p * total * 1.0001)
    high = tl.maximum(top, FINITE)
    low = tl.min(tl.where(some, peak, high), 0)
    beyond = high + tl.maximum(tl.abs(high) * 2.4e-7, TINY)
    enough = tl.sum(weight, 0) >= target
    for _ in range(HALVINGS):
        middle = low + (high - low) * 0.5
        fits = tl.sum(tl.where(peak >= middle, weight, 0.0), 0) >= target
        low = tl.where(fits, middle, low)
        high = tl.where(fits, high, middle)
    bound = tl.where(enough, low, float("-inf"))
    rest = tl.maximum((1.0 - p) * 0.99 * total / vocab, TINY)
    bound = tl.maximum(bound, tl.where(by_count, float("-inf"), top + tl.log(rest)))
    # After min-p the nucleus is a share of all that is above the floor: all of it is needed.
    only_floor = (share > 0) & (by_count == 0)
    bound = tl.where(only_floor, floor, tl.maximum(bound, floor))
    kind = tl.where(by_count, COUNT, tl.where(only_floor, FLOOR_MASS, MASS))
    kind = tl.where((by_count | (p < 1.0)) & (top > float("-inf")), kind, NOTHING)
    tl.store(floors + row, floor)
    tl.store(facts + row * FIELDS, bound)
    tl.store(facts + row * FIELDS + 1, top)
    tl.store(facts + row * FIELDS + 2, total)
    tl.store(facts + row * FIELDS + 3, beyond)
    tl.store(kinds + row, kind)
    tl.store(cursors + row, 0)


@triton.jit
def _pivots(low, high):
    """Return the lower ends of the bracket's PARTS; fused, so that every kernel has the same
    numbers."""
    part = tl.arange(0, PARTS).to(tl.float32)
    step = (high - low) / PARTS + tl.zeros_like(part)
    return tl.fma(step, part, low + tl.zeros_like(part))


@triton.jit
def bracket(
    facts, kinds, top_p, partials, row, chunks,
    ROUND: tl.constexpr, ROUNDS: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Return the row's bracket after ROUND rounds: its ends, the mass above it, the mass to reach.

    Every program computes it from the rounds' partial sums, which saves a launch a round.
    """
    low = tl.load(facts + row * FIELDS)
    high = tl.load(facts + row * FIELDS + 3)
    total = tl.load(facts + row * FIELDS + 2)
    kind = tl.load(kinds + row)
    p = tl.load(top_p + row)
    above = 0.0
    part = tl.arange(0, PARTS)
    chunk = tl.arange(0, CHUNKS)
    target = tl.maximum(p * total, TINY)
    if kind >= MASS:
        for i in tl.static_range(ROUND):
            at = partials + ((row * ROUNDS + i) * chunks + chunk[:, None]) * PARTS + part[None, :]
            sums = tl.sum(tl.load(at, mask=(chunk < chunks)[:, None], other=0.0), 0)
            if (i == 0) & (kind == FLOOR_MASS):
                target = tl.maximum(p * tl.max(sums, 0), TINY)
            pivots = _pivots(low, high)
            reached = above + sums
            enough = (reached >= target) | (part == 0)
            short = (enough == 0) & (pivots > low)
            above = tl.max(tl.where(short, reached, above), 0)
            new_low = tl.max(tl.where(enough & (pivots < high), pivots, low), 0)
            high = tl.min(tl.where(short, pivots, high), 0)
            low = new_low
    return low, high, above, target


@triton.jit
def weigh_rows(
    logits, temperature, peaks, top_p, facts, kinds, partials, row_stride, vocab, groups, chunks,
    GROUP: tl.constexpr, AT_ONCE: tl.constexpr, STEPS: tl.constexpr, ROUND: tl.constexpr,
    ROUNDS: tl.constexpr, CHUNKS: tl.constexpr, LANES: tl.constexpr, SCALED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Weigh a chunk's logits within the bracket, from each of its parts upwards.

    A chunk is STEPS * AT_ONCE groups, a step LANES threads with a run of logits each. partials
    float32 [rows, ROUNDS, chunks, PARTS]. Grid: (chunks, rows); only rows that top-p cuts without
    top-k have work.
    """
    EACH: tl.constexpr = AT_ONCE * GROUP // LANES
    follow(PDL)
    row = tl.program_id(1).to(tl.int64)
    chunk = tl.program_id(0)
    if tl.load(kinds + row) >= MASS:
        low, high, _above, _target = bracket(
            facts, kinds, top_p, partials, row, chunks, ROUND, ROUNDS, CHUNKS
        )
        top = tl.load(facts + row * FIELDS + 1)
        group = chunk * STEPS * AT_ONCE + tl.arange(0, STEPS * AT_ONCE)
        peak = tl.load(peaks + row * groups + group, mask=group < groups, other=float("-inf"))
        part = tl.arange(0, PARTS)
        sums = tl.zeros([PARTS], tl.float32)
        if tl.max(peak, 0) >= low:
            every = _pivots(low, high)
            logits += row * row_stride
            parts = ()
            pivots = ()
            for i in tl.static_range(PARTS):
                parts = parts + (tl.zeros([LANES], tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
                pivot = tl.max(tl.where(part == i, every, float("-inf")), 0)
                pivots = pivots + (pivot,)  # type: ignore[assignment]  # noqa: RUF005
            cold = 1.0
            if SCALED:  # a product instead of the quotient: these sums may be off by a rounding
                cold = 1.0 / tl.load(temperature + row)
            in_step = tl.arange(0, LANES)[:, None] * EACH + tl.arange(0, EACH)[None, :]
            for step in tl.static_range(STEPS):
                at = (chunk * STEPS + step) * AT_ONCE * GROUP + in_step
                value = tl.load(logits + at, mask=at < vocab, other=float("-inf"))
                value = value.to(tl.float32) * cold
                within = (value >= low) & (value < high)
                weight = tl.where(within, tl.exp(value - top), 0.0)
                more = ()
                for i in tl.static_range(PARTS):
                    mine = tl.sum(tl.where(value >= pivots[i], weight, 0.0), 1)
                    more = more + (parts[i] + mine,)  # type: ignore[assignment]  # noqa: RUF005
                parts = more
            for i in tl.static_range(PARTS):
                sums += tl.where(part == i, tl.sum(parts[i], 0), 0.0)
        tl.store(partials + ((row * ROUNDS + ROUND) * chunks + chunk) * PARTS + part, sums)


@triton.jit(do_not_specialize=["cursors"])
def gather_rows(
    logits, temperature, peaks, top_p, facts, kinds, partials, cursors, found,
    row_stride, vocab, groups, chunks,
    GROUP: tl.constexpr, AT_ONCE: tl.constexpr, STEPS: tl.constexpr, ROUNDS: tl.constexpr,
    CHUNKS: tl.constexpr, SCALED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Copy the row's finite logits within its bracket to found[row]; any order.

    found float32 [rows, 2, vocab], of which the first half is filled; cursors count. Chunks are
    those of `weigh_rows`; groups without such a logit are not read. Grid: (chunks, rows).
    """
    follow(PDL)
    row = tl.program_id(1).to(tl.int64)
    chunk = tl.program_id(0)
    if tl.load(kinds + row) != NOTHING:
        low, high, _above, _target = bracket(
            facts, kinds, top_p, partials, row, chunks, ROUNDS, ROUNDS, CHUNKS
        )
        step_of = tl.arange(0, STEPS * AT_ONCE) // AT_ONCE
        group = chunk * STEPS * AT_ONCE + tl.arange(0, STEPS * AT_ONCE)
        peak = tl.load(peaks + row * groups + group, mask=group < groups, other=float("-inf"))
        logits += row * row_stride
        if tl.max(peak, 0) >= tl.maximum(low, FINITE):
            for step in range(STEPS):
                here = tl.max(tl.where(step_of == step, peak, float("-inf")), 0)
                if here >= tl.maximum(low, FINITE):
                    at = (chunk * STEPS + step) * AT_ONCE * GROUP + tl.arange(0, AT_ONCE * GROUP)
                    value = load_kept(
                        logits, at, at < vocab, temperature, facts, row, SCALED, False
                    )
                    keep = (value >= low) & (value < high) & (value > float("-inf"))
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
def _sum_above(values, count, floor, top, BLOCK: tl.constexpr):
    """Return the mass of values[:count] that are at or above floor, and their smallest."""
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
    """Copy values[:count] in low <= v < high to `target`, which may be `values`; return their
    number.

    In place, a block is read before its place is written.
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
    """Cut the bracket of `_search` into PARTS in one pass over values[:count]; return the right
    one."""
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
    """Run `_search` on at most BLOCK values: each is weighed against all the others."""
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
    """Return the largest v of values[:count] in low <= v < high whose weights from v up reach
    `target`.

    `above` is the weight at or above `high`; with all at or above `low` it must reach the target.
    The bracket is cut until a block of values is left, or no float lies within it: then all are
    equal.
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
    """Set floors[row] to the row's threshold under min-p, top-k and top-p. Grid: (rows,)."""
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
