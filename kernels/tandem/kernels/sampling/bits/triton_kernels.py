"""Jit code of the bits, a program some words of a row."""

from __future__ import annotations

import triton
import triton.language as tl

from tandem.kernels.launch.triton_kernels import follow


@triton.jit
def keep_bits_of_rows(
    logits, words, rows, row_stride, word_stride, vocabulary, count,
    WORDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Apply the bits in place on float [rows, vocabulary]. Grid: (bounded, cdiv(count, WORDS))."""
    follow(PDL)
    bounded = tl.program_id(0)
    first = tl.program_id(1) * WORDS
    at = first + tl.arange(0, WORDS)
    row = tl.load(rows + bounded)
    row_words = tl.where(row >= 0, count, 0)
    word = tl.load(words + bounded * word_stride + at, mask=at < row_words, other=0)
    place = tl.arange(0, 32)
    allowed = ((word[:, None] >> place[None, :]) & 1) != 0
    token = at[:, None] * 32 + place[None, :]
    inside = token < tl.where(row >= 0, vocabulary, 0)
    here = logits + row * row_stride + token
    value = tl.load(here, mask=inside & allowed, other=0.0).to(tl.float32)
    value = tl.where(allowed, tl.maximum(value, -1e30), float("-inf"))
    tl.store(here, value.to(logits.dtype.element_ty), mask=inside)
