"""Decode attention compiled by LLVM, straight from the pages, for float32 and plain scores; the
rest is torch's.

A thread takes pairs of a sequence and a query head. It writes the scores of a pair, then their
powers, then sums the values.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from tandem.kernels.attention.batch import PagedBatch, Scores
from tandem.kernels.llvm.build import LANES
from tandem.kernels.llvm.compiled import agrees, bits_of, call

from . import reference
from .llvm_kernels import FIELDS, kernel_of

_Fields = ctypes.c_int64 * len(FIELDS)
_MOST_DIM = 256
"""Largest head size, whose sums nearly fit in registers."""


def decode(
    q: Tensor, kv: Tensor, batch: PagedBatch, scores: Scores, kv_scales: Tensor | None
) -> Tensor:
    """See the wrapper."""
    dim = q.shape[2]
    floats = q.dtype == kv.dtype == torch.float32 and kv_scales is None
    dense = batch.block_tables.stride(1) == 1 == batch.seq_lens.stride(0)
    if not (floats and dense and scores.plain) or dim % LANES or dim > _MOST_DIM:
        return reference.decode(q, kv, batch, scores, kv_scales)
    if not _fits(dim):
        return reference.decode(q, kv, batch, scores, kv_scales)
    return _attended(q, kv, batch, scores)


def _attended(q: Tensor, kv: Tensor, batch: PagedBatch, scores: Scores) -> Tensor:
    sequences, heads, dim = q.shape
    keys = batch.max_seq_len if scores.window is None else min(scores.window, batch.max_seq_len)
    width = -(-keys // LANES) * LANES
    out, powers = torch.empty(q.shape), torch.empty(sequences * heads * width)
    fields = _Fields(
        *(q.data_ptr(), q.stride(0), q.stride(1), out.data_ptr(), powers.data_ptr(), width),
        *(kv.data_ptr(), *kv.stride()[:3], kv.shape[3], heads, heads // kv.shape[2]),
        *(batch.block_tables.data_ptr(), batch.block_tables.stride(0), batch.seq_lens.data_ptr()),
        *(sequences * heads, keys, bits_of(scores.scale)),
    )
    call(kernel_of(dim), fields, 2 * sequences * heads * keys * dim)
    return out


@cache
def _fits(dim: int) -> bool:
    def pair() -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(0)
        q = torch.randn(2, 4, dim, generator=draw)
        kv = torch.randn(6, 2, 2, 16, dim, generator=draw)
        lens = torch.tensor([37, 2], dtype=torch.int32)
        tables = torch.tensor([[4, 1, 2], [3, 0, 0]], dtype=torch.int32)
        batch = PagedBatch(torch.arange(3, dtype=torch.int32), lens, tables, 1, 37)
        scores = Scores(dim**-0.5, window=20)
        return _attended(q, kv, batch, scores), reference.decode(q, kv, batch, scores, None)

    return agrees("attention.decode", pair)
