"""Jit code of block moves and of the digest's first level."""

from __future__ import annotations

import triton
import triton.language as tl

from tandem.kernels.bits.triton_kernels import mix, place


@triton.jit
def move_rows(
    source, target, source_ids, target_ids, words, PER_ROW,
    GATHER: tl.constexpr, SCATTER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """target[t] = source[s] for rows of `words` elements. Grid: (rows, PER_ROW).

    Row i goes from source_ids[i] (with GATHER, else i) to target_ids[i] (with SCATTER, else i);
    program j of PER_ROW of a row takes every PER_ROW-th piece of BLOCK elements.
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


@triton.jit
def chunk_terms(data, low_keys, high_keys, terms, words, WORDS: tl.constexpr):
    """Term of one chunk of WORDS int64 in the digest's sum (multilinear.py). Grid: (chunks,)."""
    chunk = tl.program_id(0).to(tl.int64)
    in_chunk = tl.arange(0, WORDS)
    at = chunk * WORDS + in_chunk
    word = tl.load(data + at, mask=at < words, other=0)
    s1 = tl.sum(word * tl.load(low_keys + in_chunk), 0)
    s2 = tl.sum((word >> 32) * tl.load(high_keys + in_chunk), 0)
    tl.store(terms + chunk, mix(s1 + mix(s2 + place(chunk))))


@triton.jit(do_not_specialize=["out", "count", "num_bytes"])
def fold_terms(terms, out, count, num_bytes, BLOCK: tl.constexpr):
    """The digest of `num_bytes` from the terms of its `count` chunks, in one program: a kernel of
    its own, so that no other has to be counted through. Grid: (1,)."""
    total = tl.zeros([BLOCK], tl.int64)
    for start in tl.range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(terms + at, mask=at < count, other=0)
    tl.store(out, mix(tl.sum(total, 0) + num_bytes))
