"""Paged batches to measure attention on, and their results in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.kernels.attention import PagedBatch


@dataclass(frozen=True, slots=True)
class Shape:
    """Heads and pages of a model; the default is Qwen3-8B."""

    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page: int = 64
    dtype: torch.dtype = torch.bfloat16

    @property
    def key_bytes(self) -> int:
        return 2 * self.kv_heads * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Case:
    """A batch with its KV cache; q has one entry a layer, so that repeated launches find cold
    pages."""

    q: Tensor
    kv_cache: Tensor
    batch: PagedBatch
    lengths: list[int]
    queries: list[int]

    def layer(self, index: int) -> Tensor:
        """Return one layer's view of the KV cache: [blocks, K|V, kv_heads, page, head_dim]."""
        return self.kv_cache[:, index]


def make_case(
    shape: Shape, lengths: list[int], queries: list[int], layers: int, device: str = "cuda"
) -> Case:
    """Return random pages in random places, NaN after every sequence's last token, and random
    queries."""
    counts = [-(-max(n, 1) // shape.page) for n in lengths]
    size = (sum(counts), layers, 2, shape.kv_heads, shape.page, shape.head_dim)
    kv_cache = torch.empty(size, dtype=shape.dtype, device=device)
    for block in torch.split(kv_cache, max(1, (1 << 28) // kv_cache[0].numel())):
        block.normal_()
    order = torch.randperm(sum(counts))
    tables = torch.full((len(lengths), max(counts)), 2**30, dtype=torch.int32)
    first = 0
    for s, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        tables[s, :count] = order[first : first + count]
        kv_cache[order[first + count - 1], :, :, :, length - (count - 1) * shape.page :] = torch.nan
        first += count
    starts = torch.tensor([0, *queries]).cumsum(0).to(torch.int32)
    q = torch.randn(
        layers, sum(queries), shape.heads, shape.head_dim, dtype=shape.dtype, device=device
    )
    batch = PagedBatch(
        starts.to(device),
        torch.tensor(lengths, dtype=torch.int32).to(device),
        tables.to(device),
        max(queries),
        max(lengths),
    )
    return Case(q, kv_cache, batch, lengths, queries)


def error(case: Case, layer: int, out: Tensor, scale: float) -> float:
    """Return the largest ||out - ref|| / ||ref|| over the sequences, ref in float64 on the first
    heads."""
    worst, row, kv = 0.0, 0, case.layer(layer)
    group = out.shape[1] // kv.shape[2]
    for s, (n, m) in enumerate(zip(case.lengths, case.queries, strict=True)):
        if s < 48:
            blocks = case.batch.block_tables[s, : -(-n // kv.shape[3])].long()
            h = s % kv.shape[2]
            k, v = kv[blocks][:, :, h].transpose(0, 1).reshape(2, -1, kv.shape[4])[:, :n].double()
            for a in range(0, m, 1024):
                b = min(a + 1024, m)
                q = case.q[layer, row + a : row + b, h * group : (h + 1) * group].double()
                seen = torch.arange(n, device=q.device) <= torch.arange(
                    n - m + a, n - m + b, device=q.device
                ).unsqueeze(1)
                scores = torch.einsum("tgd,nd->tgn", q, k) * scale
                p = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
                want = torch.einsum("tgn,nd->tgd", p, v)
                got = out[row + a : row + b, h * group : (h + 1) * group].double()
                gap = float((got - want).norm() / want.norm())
                worst = gap if gap > worst or gap != gap else worst
                if gap != gap:
                    return gap
        row += m
    return worst
