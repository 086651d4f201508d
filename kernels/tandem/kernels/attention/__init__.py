"""Attention over a paged KV cache: `prefill` (chunks over cached context) and `decode`."""

from __future__ import annotations

from .batch import PagedBatch, Scores

__all__ = ["PagedBatch", "Scores"]
