"""Query tiles of both prefill kernels, listed once a step on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
import triton
from torch import Tensor

from tandem.kernels.attention.batch import PagedBatch, sequence_class

from .plan_kernels import PLAN_FIELDS, plan_tiles


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tiles of a batch, those that attend to most keys first."""

    rows: Tensor
    """int32 [most tiles, PLAN_FIELDS]; only the first `count` are written."""
    count: Tensor
    """int32 [1]."""

    @property
    def most(self) -> int:
        """Return the largest possible number of tiles, known without reading the device."""
        return self.rows.shape[0]


def tiles_of(batch: PagedBatch, tokens: int, rows: int, window: int | None) -> Tiles:
    """Return the batch's queries (`tokens` in total) in tiles of `rows`; made by the first layer
    with that window."""
    key = ("prefill.tiles", rows, window)
    if key not in batch.memo:
        batch.memo[key] = _plan(batch, tokens, rows, window)
    return cast("Tiles", batch.memo[key])


def _plan(batch: PagedBatch, tokens: int, rows: int, window: int | None) -> Tiles:
    device, sequences = batch.seq_lens.device, batch.num_sequences
    most = max(1, min(tokens, tokens // rows + sequences))
    tiles = Tiles(
        torch.empty(most, PLAN_FIELDS, dtype=torch.int32, device=device),
        torch.empty(1, dtype=torch.int32, device=device),
    )
    per_program = 16
    plan_tiles[(triton.cdiv(most, per_program),)](
        batch.cu_seqlens_q,
        batch.seq_lens,
        tiles.rows,
        tiles.count,
        sequences,
        most,
        BM=rows,
        WINDOW=window or 0,
        SEQS=sequence_class(sequences),
        TILES=per_program,
        FIELDS=PLAN_FIELDS,
    )
    return tiles
