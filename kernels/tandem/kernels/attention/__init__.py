"""Attention over a paged KV cache: `prefill` (chunks over cached context) and `decode`.

Pages have the type of q, or hold float8_e4m3fn codes. Then `kv_scales`, float32 [2, kv_heads], has
the factor of K's and of V's codes of each head. Codes are exact in q's type. K's factor multiplies
the scores, V's the result, so products and sums are those of pages of q's type.
"""

from __future__ import annotations

from .batch import PagedBatch, Scores

__all__ = ["PagedBatch", "Scores"]
