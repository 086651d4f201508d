"""Batches for attention with every rule of Scores, and their softmax in float64."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tandem.kernels.attention import PagedBatch, Scores


class Case(NamedTuple):
    """One call, whose cache is NaN and whose tables are wild, except for keys in a window."""

    q: Tensor
    kv: Tensor
    batch: PagedBatch
    keys: list[Tensor]
    """float64 [keys, kv_heads, dim] of each sequence; all of its keys, also those not in `kv`."""
    values: list[Tensor]

    def want(self, scores: Scores) -> Tensor:
        """Return attention in float64, [tokens, heads, dim]; zero for a sequence without keys."""
        out = torch.zeros(self.q.shape, dtype=torch.float64)
        starts = self.batch.cu_seqlens_q.tolist()
        for s, (k, v) in enumerate(zip(self.keys, self.values, strict=True)):
            rows = slice(starts[s], starts[s + 1])
            if k.shape[0] and rows.stop > rows.start:
                out[rows] = _attend(self.q[rows].double().cpu(), k, v, scores)
        return out


def _attend(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
    group, length = q.shape[1] // k.shape[1], k.shape[0]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    s = torch.einsum("qhd,khd->hqk", q, k) * scores.scale
    distance = torch.arange(length) - torch.arange(length - q.shape[0], length)[:, None]
    if scores.softcap is not None:
        s = scores.softcap * torch.tanh(s / scores.softcap)
    if scores.slopes is not None:
        s = s + scores.slopes.double().cpu()[:, None, None] * distance
    hidden = distance > 0
    if scores.window is not None:
        hidden = hidden | (distance <= -scores.window)
    weights = s.masked_fill(hidden, -torch.inf).exp()
    mass = weights.sum(-1)
    if scores.sinks is not None:
        mass = mass + scores.sinks.double().cpu().exp()[:, None]
    return torch.einsum("hqk,khd->qhd", weights / mass[..., None], v)


def make(
    lengths: list[int],
    queries: list[int],
    *,
    window: int | None = None,
    page: int = 16,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 16,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    before: float = torch.nan,
) -> Case:
    """Return a case; `before` fills keys before the window on the window's first page."""
    torch.manual_seed(len(lengths) + dim)
    needed = [-(-n // page) for n in lengths]
    total = sum(needed) + 2
    cache = torch.full((total, 2, 2, kv_heads, page, dim), torch.nan, dtype=dtype)
    order = torch.randperm(total - 1).add(1).tolist()  # block 0 stays NaN: freed entries are 0
    tables = torch.full((len(lengths), max(needed) + 1), 2**30, dtype=torch.int32)
    keys, values = [], []
    for s, (n, m) in enumerate(zip(lengths, queries, strict=True)):
        k, v = torch.randn(2, n, kv_heads, dim).to(dtype)
        keys.append(k.double())
        values.append(v.double())
        low = 0 if window is None else max(n - max(m, 1) - window + 1, 0)
        tables[s, : low // page] = 0 if s % 2 else -(2**30)
        for b in range(low // page, needed[s]):
            tables[s, b] = block = order.pop()
            cache[block, 1, :, :, : min(page, n - b * page)] = before
            for i in range(max(low - b * page, 0), min(page, n - b * page)):
                cache[block, 1, 0, :, i] = k[b * page + i]
                cache[block, 1, 1, :, i] = v[b * page + i]
    batch = PagedBatch(
        torch.tensor([0, *queries]).cumsum(0).to(torch.int32).to(device),
        torch.tensor(lengths, dtype=torch.int32, device=device),
        tables.to(device),
        max(queries),
        max(lengths),
    ).check()
    q = torch.randn(sum(queries), heads, dim).to(dtype).to(device)
    return Case(q, cache.to(device)[:, 1], batch, keys, values)


def rules(names: str, *, heads: int = 4, device: str = "cpu", **rest: float | int) -> Scores:
    """Return Scores with the named rules, which differ from head to head."""
    values = torch.linspace(-2.0, 1.5, heads, device=device)
    scores = Scores(0.3, **rest)  # type: ignore[arg-type]
    if "softcap" in names:
        scores = scores._replace(softcap=1.5)
    if "sinks" in names:
        scores = scores._replace(sinks=values)
    if "slopes" in names:
        scores = scores._replace(slopes=2 ** (values - 3))
    return scores
