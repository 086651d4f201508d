"""Paged prefill attention in Triton, for any GPU; batches of few queries go to the decode kernel.

Prompts and chunks in one launch, over the tiles of plan.py. Roofline as in gluon.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.kernels.attention.batch import PagedBatch, in_tiles
from tandem.kernels.attention.decode import triton as decode_triton

from . import reference
from .plan import tiles_of
from .plan_kernels import PLAN_FIELDS
from .triton_kernels import prefill_tiles


@dataclass(frozen=True, slots=True)
class Tuning:
    """Tile sizes and pipelining; measured in bench/results/attention_h200.md."""

    rows: int = 64
    keys: int = 64
    warps: int = 4
    stages: int = 3


DEFAULT = Tuning()


def prefill(q: Tensor, kv: Tensor, batch: PagedBatch, scale: float) -> Tensor:
    """See the wrapper; head sizes that are not ``in_tiles`` go to the reference."""
    if not in_tiles(q.shape[2], q.dtype):
        return reference.prefill(q, kv, batch, scale)
    if decode_triton.fits(q, kv, batch):
        return decode_triton.decode(q, kv, batch, scale)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    launch(q, kv, batch, scale, out, DEFAULT)
    return out


def launch(
    q: Tensor, kv: Tensor, batch: PagedBatch, scale: float, out: Tensor, tuning: Tuning
) -> None:
    """Plan the batch unless an earlier layer did, and fill `out`."""
    heads, dim = q.shape[1:]
    kv_heads, page = kv.shape[2:4]
    tiles = tiles_of(batch, q.shape[0], tuning.rows)
    prefill_tiles[(heads, tiles.most)](
        q,
        kv,
        batch.block_tables,
        tiles.rows,
        tiles.count,
        out,
        q.stride(0),
        q.stride(1),
        kv.stride(0),
        kv.stride(1),
        kv.stride(2),
        batch.block_tables.stride(0),
        scale * math.log2(math.e),
        HEADS=heads,
        GROUP=heads // kv_heads,
        D=dim,
        PAGE=page,
        BM=tuning.rows,
        BN=min(tuning.keys, page),
        STAGES=tuning.stages,
        FIELDS=PLAN_FIELDS,
        num_warps=tuning.warps,
    )
