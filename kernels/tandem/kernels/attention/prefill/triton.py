"""Paged prefill attention in Triton, for any GPU; batches of few queries go to the decode kernel.

Prompts and chunks in one launch, over the tiles of plan.py. Roofline as in gluon.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.kernels.attention.batch import PagedBatch, Scores, in_tiles, padded
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
_WIDEST = Tuning(keys=32, warps=8, stages=2)
BY_HEAD = {
    (256, 2): Tuning(rows=128, warps=8, stages=2),
    (256, 4): _WIDEST,
    (512, 2): _WIDEST,
}
"""Tuning by numbers of a padded head and bytes of a number, if not DEFAULT."""


def tuning_of(q: Tensor) -> Tuning:
    """Return the tuning for the head size and dtype of `q`, in which tiles are multiplied."""
    return BY_HEAD.get((padded(q.shape[2]), q.element_size()), DEFAULT)


def prefill(
    q: Tensor, kv: Tensor, batch: PagedBatch, scores: Scores, kv_scales: Tensor | None
) -> Tensor:
    """See the wrapper; head sizes that are not ``in_tiles`` go to the reference."""
    if not in_tiles(q.shape[2], q.dtype):
        return reference.prefill(q, kv, batch, scores, kv_scales)
    if decode_triton.fits(q, kv, batch):
        return decode_triton.decode(q, kv, batch, scores, kv_scales)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    launch(q, kv, batch, scores, out, tuning_of(q), kv_scales)
    return out


def launch(
    q: Tensor,
    kv: Tensor,
    batch: PagedBatch,
    scores: Scores,
    out: Tensor,
    tuning: Tuning,
    kv_scales: Tensor | None = None,
) -> None:
    """Plan the batch unless an earlier layer did, and fill `out`."""
    heads, dim = q.shape[1:]
    kv_heads, page = kv.shape[2:4]
    tiles = tiles_of(batch, q.shape[0], tuning.rows, scores.window)
    scale, cap = scores.in_log2()
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
        scale,
        cap,
        scores.sinks,
        scores.slopes,
        kv_scales,
        HEADS=heads,
        GROUP=heads // kv_heads,
        D=dim,
        WIDTH=padded(dim),
        PAGE=page,
        BM=tuning.rows,
        BN=min(tuning.keys, page),
        WINDOW=scores.window or 0,
        STAGES=tuning.stages,
        FIELDS=PLAN_FIELDS,
        num_warps=tuning.warps,
    )
