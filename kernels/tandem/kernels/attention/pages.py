"""Gathers pages of a strided KV cache on a CPU: a page is `[token][head_dim]` of one KV head.

A layer's pages are rows of a 2-D view, so a gather is one index_select, with the same rows for
every layer. For the torch backend.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class PageShape(NamedTuple):
    """Geometry of one layer's view of the KV cache, in pages."""

    block_stride: int
    kv_stride: int
    head_stride: int
    num_kv_heads: int
    block_size: int
    head_dim: int

    @classmethod
    def of(cls, kv: Tensor) -> PageShape:
        """Return the geometry of `kv` [num_blocks, 2, kv_heads, block_size, head_dim]."""
        page = kv.shape[3] * kv.shape[4]
        b, two, head = (kv.stride(d) // page for d in (0, 1, 2))
        return cls(b, two, head, kv.shape[2], kv.shape[3], kv.shape[4])


def page_rows(shape: PageShape, tables: Tensor) -> Tensor:
    """Return rows of `layer_pages` for blocks `tables` [sequences, n]: int64 [2 * sequences * heads
    * n].

    In the order [K|V][sequence][kv_head][block], so that a head's gathered pages are its tokens in
    order.
    """
    two = torch.arange(2, device=tables.device) * shape.kv_stride
    heads = torch.arange(shape.num_kv_heads, device=tables.device) * shape.head_stride
    blocks = tables.to(torch.int64) * shape.block_stride
    rows = two.view(2, 1, 1, 1) + blocks[None, :, None, :] + heads.view(1, 1, -1, 1)
    return rows.reshape(-1)


def layer_pages(kv: Tensor, shape: PageShape) -> Tensor:
    """Return the KV cache from this layer's first page on, as rows of one page each."""
    page = shape.block_size * shape.head_dim
    last = (
        (kv.shape[0] - 1) * shape.block_stride
        + shape.kv_stride
        + (shape.num_kv_heads - 1) * shape.head_stride
    )
    return kv.as_strided((last + 1, page), (page, 1))


def in_float32(
    attend: Callable[[Tensor, Tensor], Tensor], q: Tensor, kv: Tensor, kv_scales: Tensor
) -> Tensor:
    """Return attention over pages of codes, computed in float32.

    `attend` gets the queries times K's scales, and the pages as uint8.
    """
    k, v = kv_scales.repeat_interleave(q.shape[1] // kv.shape[2], 1).unsqueeze(2)
    attended = attend(q.float() * k, kv.view(torch.uint8))
    return attended.mul_(v).to(q.dtype)


def gather(kv: Tensor, shape: PageShape, rows: Tensor, sequences: int) -> Tensor:
    """Return a copy of K and V of the pages `rows`: [2, sequences, kv_heads, tokens, head_dim]."""
    pages = torch.index_select(layer_pages(kv, shape), 0, rows)
    return pages.view(2, sequences, shape.num_kv_heads, -1, shape.head_dim)
