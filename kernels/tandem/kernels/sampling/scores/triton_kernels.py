"""Jit code of log-probabilities, from the groups' results of one pass."""

from __future__ import annotations

import triton
import triton.language as tl

from tandem.kernels.launch.triton_kernels import follow

LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def _first_largest(value, at):
    """Return the largest of `value` and the lowest of the indices `at` that hold it."""
    largest = tl.max(value, 0)
    return largest, tl.min(tl.where(value == largest, at, 0x7FFFFFFF), 0)


@triton.jit(do_not_specialize=["top"])
def score_rows(
    logits, ids, peaks, masses, ranks, logprobs, rank, top_ids, top_logprobs,
    row_stride, vocab, groups, top,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Store log-probability and rank of ids[row], and the `top` best tokens in order. Grid:
    (rows,).

    peaks, masses and ranks by `group_stats` with RANK; GROUPS >= groups, a power of two. The group
    with the largest peak gives its best token and then shows its next best. -inf counts as LOWEST
    meanwhile, so that lanes without a token stay below every token.
    """
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)
    real = group < groups
    peak = tl.load(peaks + row * groups + group, mask=real, other=float("-inf"))
    mass = tl.load(masses + row * groups + group, mask=real, other=0.0)
    largest = tl.max(peak, 0)
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    total = shift + tl.log(tl.sum(mass * tl.exp(peak - shift), 0))
    logits += row * row_stride
    tl.store(logprobs + row, tl.load(logits + tl.load(ids + row)).to(tl.float32) - total)
    above = tl.load(ranks + row * groups + group, mask=real, other=0)
    tl.store(rank + row, tl.sum(above, 0).to(tl.int64) + 1)
    peak = tl.where(real, tl.maximum(peak, LOWEST), float("-inf"))
    before = tl.full([], float("inf"), tl.float32)
    last = tl.full([], -1, tl.int32)
    for place in range(top):
        _, where = _first_largest(peak, group)
        token = where * GROUP + tl.arange(0, GROUP)
        value = tl.load(logits + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
        value = tl.where(token < vocab, tl.maximum(value, LOWEST), float("-inf"))
        # Those that were given already: above the one before, or equal with no higher id.
        given = (value > before) | ((value == before) & (token <= last))
        value = tl.where(given, float("-inf"), value)
        before, last = _first_largest(value, token)
        tl.store(top_ids + row * top + place, last.to(tl.int64))
        score = tl.where(before == LOWEST, float("-inf"), before) - total
        tl.store(top_logprobs + row * top + place, score)
        rest = tl.max(tl.where(token == last, float("-inf"), value), 0)
        peak = tl.where(group == where, rest, peak)
