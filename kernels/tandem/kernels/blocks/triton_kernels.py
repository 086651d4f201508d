"""Jit code of block moves and of the digest."""

from __future__ import annotations

import triton
import triton.language as tl

from tandem.kernels.bits.triton_kernels import mix, place


# Offsets of block numbers in a buffer must not build another kernel.
@triton.jit(do_not_specialize=["source_ids", "target_ids"])
def move_rows(
    source, target, source_ids, target_ids, words, PER_ROW,
    GATHER: tl.constexpr, SCATTER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy target[t] = source[s] for rows of `words` elements. Grid: (rows, PER_ROW).

    Row i goes from source_ids[i] (with GATHER, else i) to target_ids[i] (with SCATTER, else i);
    program j of a row takes every PER_ROW-th piece of BLOCK elements.
    """
    row = tl.program_id(0).to(tl.int64)
    s = row
    t = row
    if GATHER:
        s = tl.load(source_ids + row)
    if SCATTER:
        t = tl.load(target_ids + row)
    for start in tl.range(tl.program_id(1) * BLOCK, words, PER_ROW * BLOCK):
        at = start + tl.arange(0, BLOCK)
        keep = at < words
        value = tl.load(source + s * words + at, mask=keep)
        tl.store(target + t * words + at, value, mask=keep)


@triton.jit(do_not_specialize=["total", "words", "num_bytes"])
def add_terms(data, low_keys, high_keys, total, words, num_bytes, WORDS: tl.constexpr):
    """Add the term of one chunk of WORDS int64 to the digest (multilinear.py) of `num_bytes`; the
    first adds the length, too. Grid: (chunks,)."""
    chunk = tl.program_id(0).to(tl.int64)
    in_chunk = tl.arange(0, WORDS)
    at = chunk * WORDS + in_chunk
    if (chunk + 1) * WORDS <= words:  # loaded with the device's full width
        word = tl.load(data + at)
    else:
        word = tl.load(data + at, mask=at < words, other=0)
    s1 = tl.sum(word * tl.load(low_keys + in_chunk), 0)
    s2 = tl.sum((word >> 32) * tl.load(high_keys + in_chunk), 0)
    term = mix(s1 + mix(s2 + place(chunk)))
    tl.atomic_add(total, term + tl.where(chunk == 0, num_bytes, 0), sem="relaxed")
