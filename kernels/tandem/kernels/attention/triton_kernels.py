"""Jit code that decode and prefill attention share in Triton."""

from __future__ import annotations

import math

import triton
import triton.language as tl

LOG2E = tl.constexpr(math.log2(math.e))


@triton.jit
def score(products, key, position, scale, cap, slope):
    """Return scores in powers of two of q · k [rows, keys]; cap and slope [rows] may be None.

    scale and cap are those of Scores.in_log2.
    """
    s = products * scale
    if cap is not None:
        s = cap - 2.0 * cap / (1.0 + tl.exp2(s))
    if slope is not None:
        s += slope[:, None] * (key[None, :] - position[:, None]).to(tl.float32)
    return s


@triton.jit
def load_heads(pointers, inside, D: tl.constexpr, WIDTH: tl.constexpr):
    """Load a tile of heads padded from D to WIDTH columns; `inside` masks those that exist."""
    return tl.load(pointers) if D == WIDTH else tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def in_type(tile, TYPE: tl.constexpr):
    """Return a tile of numbers of TYPE, or of codes, in TYPE.

    Codes become bfloat16 by way of float32: from float16, which is between, it takes longer.
    """
    if tile.dtype == tl.float8e4nv and tl.bfloat16 == TYPE:
        return tile.to(tl.float32).to(TYPE)
    return tile.to(TYPE)


@triton.jit
def mask_heads(rows, cols, D: tl.constexpr, WIDTH: tl.constexpr):
    """Return the mask of a tile [rows, WIDTH] from that of its rows."""
    return rows[:, None] if D == WIDTH else rows[:, None] & (cols < D)[None, :]
