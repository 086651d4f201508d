"""Jit code that merges two attention states, a program a few rows."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def merge_rows(
    out,
    lse,
    other,
    other_lse,
    result,
    result_lse,
    num_rows,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Rows of ROWS (token, head) pairs; WIDTH >= D, a power of two. Grid: cdiv(num_rows, ROWS).

    All tensors dense: [rows, D] and float32 [rows].
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, WIDTH)
    real = row < num_rows
    a = tl.load(lse + row, mask=real, other=float("-inf"))
    b = tl.load(other_lse + row, mask=real, other=float("-inf"))
    top = tl.maximum(a, b)
    shift = tl.where(top == float("-inf"), 0.0, top)
    mine = tl.exp(a - shift)
    theirs = tl.exp(b - shift)
    total = mine + theirs
    safe = tl.where(total > 0.0, total, 1.0)
    at = row[:, None] * D + col[None, :]
    keep = real[:, None] & (col < D)[None, :]
    x = tl.load(out + at, mask=keep, other=0.0).to(tl.float32)
    y = tl.load(other + at, mask=keep, other=0.0).to(tl.float32)
    value = x * (mine / safe)[:, None] + y * (theirs / safe)[:, None]
    tl.store(result + at, value.to(result.dtype.element_ty), mask=keep)
    merged = tl.where(total > 0.0, shift + tl.log(safe), float("-inf"))
    tl.store(result_lse + row, merged, mask=real)
