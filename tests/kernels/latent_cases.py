"""Batches over pages of latents, for tests of latent attention."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tandem.kernels.attention import PagedBatch


class Sizes(NamedTuple):
    """Numbers of one layer."""

    heads: int = 3
    rank: int = 24
    rope: int = 8
    nope: int = 12
    value: int = 20
    page: int = 16


SMALL = Sizes()


class LatentCase(NamedTuple):
    """Queries, pages and weights of one layer; numbers that no token has are NaN."""

    q: Tensor
    """[tokens, heads, nope + rope]."""
    kv: Tensor
    kv_b: Tensor
    batch: PagedBatch
    scale: float

    @property
    def absorbed(self) -> tuple[Tensor, Tensor]:
        """Return the queries' products with the keys' rows of kv_b, and their rotated numbers."""
        rope = self.kv.shape[2] - self.kv_b.shape[2]
        nope = self.q.shape[2] - rope
        latent = torch.einsum("thn,hnr->thr", self.q[..., :nope].double(), self.weights()[0])
        return latent.to(self.q.dtype), self.q[..., nope:]

    def weights(self) -> tuple[Tensor, Tensor]:
        """Return the rows of kv_b for keys and for values, in float64."""
        nope = self.q.shape[2] - self.kv.shape[2] + self.kv_b.shape[2]
        return self.kv_b[:, :nope].double(), self.kv_b[:, nope:].double()

    def latent_answer(self) -> Tensor:
        """Return the attention of ``absorbed`` over latents, float64 [tokens, heads, rank]."""
        latent, rope = (each.double() for each in self.absorbed)
        return self._answer(torch.cat((latent, rope), 2), self.kv_b.shape[2])

    def _answer(self, q: Tensor, rank: int) -> Tensor:
        out = torch.zeros(*q.shape[:2], rank, dtype=torch.float64, device=q.device)
        starts = self.batch.cu_seqlens_q.tolist()
        for s, n in enumerate(self.batch.seq_lens.tolist()):
            a, b = starts[s], starts[s + 1]
            if n and b > a:
                table = self.batch.block_tables[s, : -(-n // self.kv.shape[1])].long()
                rows = self.kv[table].flatten(0, 1)[:n].double()
                scores = torch.einsum("qhd,kd->hqk", q[a:b], rows) * self.scale
                at = torch.arange(n, device=q.device)
                scores.masked_fill_(at > at[n - (b - a) :, None], -torch.inf)
                out[a:b] = torch.einsum("hqk,kr->qhr", scores.softmax(-1), rows[:, :rank])
        return out

    def answer(self) -> Tensor:
        """Return the attention over expanded keys and values, float64 [tokens, heads, value]."""
        return torch.einsum("thr,hvr->thv", self.latent_answer(), self.weights()[1])


def latent_case(
    lengths: list[int],
    queries: list[int],
    *,
    sizes: Sizes = SMALL,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> LatentCase:
    """Return a batch of sequences with the last ``queries`` of their ``lengths`` tokens, over one
    layer of three. Entries of block tables after the last are no blocks."""
    torch.manual_seed(len(lengths) + sum(lengths))
    page, width = sizes.page, sizes.rank + sizes.rope
    needed = [-(-n // page) for n in lengths]
    pages = torch.full((sum(needed) + 2, 3, page, width), torch.nan, dtype=dtype)
    order = torch.randperm(len(pages)).tolist()
    tables = torch.full((len(lengths), max(needed) + 1), 2**30, dtype=torch.int32)
    for s, n in enumerate(lengths):
        for b in range(needed[s]):
            tables[s, b] = block = order.pop()
            some = min(page, n - b * page)
            pages[block, :, :some] = torch.randn(3, some, width).to(dtype)
    batch = PagedBatch(
        torch.tensor([0, *queries], device=device).cumsum(0).to(torch.int32),
        torch.tensor(lengths, dtype=torch.int32, device=device),
        tables.to(device),
        max(queries),
        max(lengths),
    )
    q = torch.randn(sum(queries), sizes.heads, sizes.nope + sizes.rope).to(dtype).to(device)
    kv_b = torch.randn(sizes.heads, sizes.nope + sizes.value, sizes.rank) * sizes.rank**-0.5
    scale = (sizes.nope + sizes.rope) ** -0.5
    return LatentCase(q, pages.to(device)[:, 1], kv_b.to(dtype).to(device), batch, scale)


BATCHES = [
    ([1], [1]),
    ([33, 1, 0, 16, 70], [1, 1, 1, 1, 1]),
    ([50, 16, 7, 0], [33, 16, 1, 0]),
    ([64, 40], [64, 3]),
]
"""Lengths and queries: decodes, chunks over cached tokens, whole prompts; rows of padding."""
