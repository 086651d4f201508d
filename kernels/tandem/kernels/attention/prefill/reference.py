"""Prefill attention in plain torch: per sequence, gather its pages and call SDPA."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tandem.kernels.attention.batch import PagedBatch
from tandem.kernels.attention.pages import PageShape, gather, page_rows


class _Chunk(NamedTuple):
    start: int
    stop: int
    keys: int
    rows: Tensor
    mask: Tensor | None
    """Added to the scores, [queries, keys]; None for plain causality."""


def prefill(q: Tensor, kv: Tensor, batch: PagedBatch, scale: float) -> Tensor:
    """See the wrapper."""
    shape = PageShape.of(kv)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for chunk in _plan(batch, shape, q.dtype):
        pages = gather(kv, shape, chunk.rows, 1)[:, :, :, : chunk.keys]
        attended = scaled_dot_product_attention(
            q[chunk.start : chunk.stop].transpose(0, 1).unsqueeze(0),
            pages[0],
            pages[1],
            attn_mask=chunk.mask,
            is_causal=chunk.mask is None and chunk.stop - chunk.start > 1,
            scale=scale,
            enable_gqa=True,
        )
        out[chunk.start : chunk.stop] = attended[0].transpose(0, 1)
    return out


def _plan(batch: PagedBatch, shape: PageShape, dtype: torch.dtype) -> list[_Chunk]:
    key = ("prefill.torch", shape, dtype)
    if key not in batch.memo:
        starts, lens = batch.cu_seqlens_q.tolist(), batch.seq_lens.tolist()
        batch.memo[key] = [
            _chunk(batch.block_tables[s], starts[s], starts[s + 1], lens[s], shape, dtype)
            for s in range(batch.num_sequences)
            if starts[s + 1] > starts[s]
        ]
    return cast("list[_Chunk]", batch.memo[key])


def _chunk(
    table: Tensor, start: int, stop: int, keys: int, shape: PageShape, dtype: torch.dtype
) -> _Chunk:
    blocks = -(-keys // shape.block_size)
    rows = page_rows(shape, table[:blocks].unsqueeze(0))
    queries = stop - start
    mask = None
    if 1 < queries < keys:
        seen = torch.arange(keys, device=table.device) <= torch.arange(
            keys - queries, keys, device=table.device
        ).unsqueeze(1)
        mask = torch.zeros(queries, keys, dtype=dtype, device=table.device)
        mask.masked_fill_(~seen, float("-inf"))
    return _Chunk(start, stop, keys, rows, mask)
