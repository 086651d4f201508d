"""Jit code of the choice: one pass that leaves a peak and a mass a group, then a small race.

Sums and comparisons are in float32, the quotient by the temperature is rounded as by IEEE, and the
noise's logarithms are computed in float64.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tandem.kernels.bits.triton_kernels import logical_shift, mix, place
from tandem.kernels.launch.triton_kernels import follow


@triton.jit
def load_kept(
    logits, at, keep, temperature, floor, row, SCALED: tl.constexpr, FLOORED: tl.constexpr
):
    """Return float32 logits of a row over its temperature, -inf below its floor and where not
    `keep`."""
    value = tl.load(logits + at, mask=keep, other=float("-inf")).to(tl.float32)
    if SCALED:
        divisor = tl.load(temperature + row)
        value = tl.div_rn(value, divisor + tl.zeros_like(value))
    if FLOORED:
        value = tl.where(value < tl.load(floor + row), float("-inf"), value)
    return value


@triton.jit
def group_stats(
    logits, temperature, floor, chosen, peaks, masses, ranks, row_stride, vocab, groups,
    GROUP: tl.constexpr, AT_ONCE: tl.constexpr, SCALED: tl.constexpr, FLOORED: tl.constexpr,
    MASS: tl.constexpr, RANK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Store per group of GROUP tokens its largest logit, and with MASS its sum of exp(logit -
    largest).

    logits [rows, vocab] with a row stride; peaks, masses float32 and ranks int32 [rows, groups].
    With RANK, also how many logits are above that of token chosen[row]. Grid: (cdiv(groups,
    AT_ONCE), rows).
    """
    follow(PDL)
    row = tl.program_id(1).to(tl.int64)
    group = tl.program_id(0) * AT_ONCE + tl.arange(0, AT_ONCE)
    token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    logits += row * row_stride
    value = load_kept(logits, token, token < vocab, temperature, floor, row, SCALED, FLOORED)
    peak = tl.max(value, 1)
    real = group < groups
    tl.store(peaks + row * groups + group, peak, mask=real)
    if MASS:
        finite = tl.where(peak == float("-inf"), 0.0, peak)
        mass = tl.sum(tl.exp(value - finite[:, None]), 1)
        tl.store(masses + row * groups + group, mass, mask=real)
    if RANK:
        mark = tl.load(logits + tl.load(chosen + row)).to(tl.float32)
        tl.store(ranks + row * groups + group, tl.sum((value > mark).to(tl.int32), 1), mask=real)


@triton.jit
def best_of_groups(
    logits, peaks, tokens, row_stride, vocab, groups,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Set tokens[row] to the first largest logit, from the groups' peaks. Grid: (rows,).

    GROUPS >= groups, a power of two.
    """
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)
    peak = tl.load(peaks + row * groups + group, mask=group < groups, other=float("-inf"))
    first = tl.argmax(peak, 0, tie_break_left=True).to(tl.int64) * GROUP
    token = first + tl.arange(0, GROUP)
    value = tl.load(logits + row * row_stride + token, mask=token < vocab, other=float("-inf"))
    found = first + tl.argmax(value.to(tl.float32), 0, tie_break_left=True)
    tl.store(tokens + row, tl.minimum(found, vocab - 1))


@triton.jit
def exponential(key, index):
    """Return float32 noise of `rng.exponentials`: the same bits, the logarithm in float64."""
    bits = logical_shift(mix(key + place(index)), 32)
    uniform = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    return (-tl.log(1.0 - uniform.to(tl.float64))).to(tl.float32)


@triton.jit
def race(
    logits, temperature, floor, keys, rows, peaks, masses, tokens, row_stride, vocab, groups,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, GROUP_NOISE: tl.constexpr,
    SCALED: tl.constexpr, FLOORED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Set tokens[draw] by the race in two legs over row rows[draw]. Grid: (draws,).

    peaks and masses by `group_stats`; GROUPS >= groups, a power of two.
    """
    follow(PDL)
    draw = tl.program_id(0)
    row = tl.load(rows + draw)
    key = tl.load(keys + draw)
    group = tl.arange(0, GROUPS)
    real = group < groups
    peak = tl.load(peaks + row * groups + group, mask=real, other=float("-inf"))
    mass = tl.load(masses + row * groups + group, mask=real, other=0.0)
    top = tl.maximum(tl.max(peak, 0), -3.4028234663852886e38)
    weight = tl.div_rn(
        mass * tl.exp(peak - top), exponential(key, group.to(tl.int64) + GROUP_NOISE)
    )
    won = tl.argmax(tl.where(real, weight, -1.0), 0, tie_break_left=True).to(tl.int64)
    token = won * GROUP + tl.arange(0, GROUP)
    logits += row * row_stride
    value = load_kept(logits, token, token < vocab, temperature, floor, row, SCALED, FLOORED)
    noise = tl.log(exponential(key, token).to(tl.float64)).to(tl.float32)
    found = won * GROUP + tl.argmax(value - noise, 0, tie_break_left=True)
    tl.store(tokens + draw, tl.minimum(found, vocab - 1))
