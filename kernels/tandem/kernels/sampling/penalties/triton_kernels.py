"""Jit code of the penalties, a program some (row, token) pairs."""

from __future__ import annotations

import triton
import triton.language as tl

from tandem.kernels.launch.triton_kernels import follow


@triton.jit(do_not_specialize=["pairs"])
def penalize_pairs(
    logits, rows, tokens, counts, repetition, frequency, presence, row_stride, pairs,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Penalize float32 [rows, vocabulary] in place; distinct pairs. Grid: (cdiv(pairs, BLOCK),)."""
    follow(PDL)
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = pair < pairs
    row = tl.load(rows + pair, mask=keep, other=0)
    at = logits + row * row_stride + tl.load(tokens + pair, mask=keep, other=0)
    count = tl.load(counts + pair, mask=keep, other=0.0)
    repeat = tl.load(repetition + row)
    seen = tl.load(at, mask=keep, other=0.0)
    seen = tl.where(seen > 0, tl.div_rn(seen, repeat), seen * repeat)
    seen -= tl.load(frequency + row) * count
    seen -= tl.where(count > 0, tl.load(presence + row), 0.0)
    tl.store(at, seen, mask=keep)
