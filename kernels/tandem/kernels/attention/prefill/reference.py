"""Prefill attention in plain torch: per sequence, gather its pages and call SDPA.

With a window, only the pages from the first query's window on are gathered.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tandem.kernels.attention.batch import PagedBatch, Scores
from tandem.kernels.attention.pages import PageShape, gather, in_float32, page_rows
from tandem.kernels.attention.softmax import attend
from tandem.kernels.narrow.codes import from_codes


class _Chunk(NamedTuple):
    start: int
    stop: int
    keys: slice
    """Keys of the gathered pages that a query may attend to."""
    rows: Tensor
    mask: Tensor | None
    """Added to the scores, [queries, keys]; None for plain causality."""

    def distance(self) -> Tensor:
        """Return the position of each key minus that of each query, [queries, keys]."""
        queries, keys = self.stop - self.start, self.keys.stop - self.keys.start
        key = torch.arange(keys, device=self.rows.device)
        return key - torch.arange(keys - queries, keys, device=self.rows.device).unsqueeze(1)


def prefill(
    q: Tensor, kv: Tensor, batch: PagedBatch, scores: Scores, kv_scales: Tensor | None
) -> Tensor:
    """See the wrapper."""
    if kv_scales is not None:
        return in_float32(lambda q, kv: _prefill(q, kv, batch, scores), q, kv, kv_scales)
    return _prefill(q, kv, batch, scores)


def _prefill(q: Tensor, kv: Tensor, batch: PagedBatch, scores: Scores) -> Tensor:
    shape = PageShape.of(kv)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for chunk in _plan(batch, shape, q.dtype, scores):
        pages = gather(kv, shape, chunk.rows, 1)[:, :, :, chunk.keys]
        if pages.dtype == torch.uint8:
            pages = from_codes(pages, q.dtype)
        attended = _attend(q[chunk.start : chunk.stop].transpose(0, 1)[None], pages, chunk, scores)
        out[chunk.start : chunk.stop] = attended[0].transpose(0, 1)
    return out


def _attend(q: Tensor, pages: Tensor, chunk: _Chunk, scores: Scores) -> Tensor:
    if not scores.plain:
        mask = None if chunk.mask is None else chunk.mask[None, None]
        return attend(q, pages[0], pages[1], mask, chunk.distance()[None, None], scores)
    return scaled_dot_product_attention(
        q,
        pages[0],
        pages[1],
        attn_mask=chunk.mask,
        is_causal=chunk.mask is None and q.shape[2] > 1,
        scale=scores.scale,
        enable_gqa=True,
    )


def _plan(batch: PagedBatch, shape: PageShape, dtype: torch.dtype, scores: Scores) -> list[_Chunk]:
    key = ("prefill.torch", shape, dtype, scores.window, scores.plain)
    if key not in batch.memo:
        starts, lens = batch.cu_seqlens_q.tolist(), batch.seq_lens.tolist()
        batch.memo[key] = [
            _chunk(batch.block_tables[s], starts[s], starts[s + 1], lens[s], shape, dtype, scores)
            for s in range(batch.num_sequences)
            if starts[s + 1] > starts[s]
        ]
    return cast("list[_Chunk]", batch.memo[key])


def _chunk(
    table: Tensor,
    start: int,
    stop: int,
    length: int,
    shape: PageShape,
    dtype: torch.dtype,
    scores: Scores,
) -> _Chunk:
    queries = stop - start
    low = 0 if scores.window is None else max(length - queries - scores.window + 1, 0)
    first = low // shape.block_size
    blocks = -(-length // shape.block_size)
    rows = page_rows(shape, table[first:blocks].unsqueeze(0))
    keys = slice(low - first * shape.block_size, length - first * shape.block_size)
    chunk = _Chunk(start, stop, keys, rows, None)
    causal = queries == length - low and scores.plain  # SDPA masks these
    narrow = scores.window is not None and scores.window < length - low
    if queries == 1 or (causal and not narrow):
        return chunk
    distance = chunk.distance()
    hidden = distance > 0
    if scores.window is not None:
        hidden |= distance <= -scores.window
    mask = torch.zeros(distance.shape, dtype=dtype, device=table.device)
    return chunk._replace(mask=mask.masked_fill_(hidden, float("-inf")))
