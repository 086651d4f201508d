"""Paged decode attention in Triton, for any GPU: a launch over the shares of plan.py.

Takes up to `SHORT_ROWS` rows of queries × group.

Roofline: bytes of K and V over the memory's read rate; see bench/results/attention_h200.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from tandem.kernels.attention.batch import (
    FEW_PAIRS,
    SHORT_ROWS,
    PagedBatch,
    Scores,
    in_tiles,
    padded,
)
from tandem.kernels.launch import dependent, sm_count

from . import reference
from .plan import Cut, shares_of
from .plan_kernels import COUNTER_STRIDE, PLAN_FIELDS
from .triton_kernels import decode_shares

_NOWHERE = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Tuning:
    """Launch parameters for one device; measured in bench/results/attention_h200.md."""

    shares_per_sm: int = 2
    tile: int = 64
    stages: int = 3
    warps: int = 4
    pieces: int = 16
    """Pieces of a (sequence, head) beyond which shares grow, for 4 rows and few pairs; half as many
    for many pairs, fewer for more rows."""
    early: bool = True
    """Whether programs may start before the kernel ahead has ended, if pairs are few."""


def decode(
    q: Tensor, kv: Tensor, batch: PagedBatch, scores: Scores, kv_scales: Tensor | None
) -> Tensor:
    """See the wrapper; also takes up to SHORT_ROWS // group queries a sequence.

    Head sizes that are not ``in_tiles`` go to the reference.
    """
    if not in_tiles(q.shape[2], q.dtype):
        return reference.decode(q, kv, batch, scores, kv_scales)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    launch(q, kv, batch, scores, out, tuning_of(q), kv_scales)
    return out


def fits(q: Tensor, kv: Tensor, batch: PagedBatch) -> bool:
    """Return whether the batch's queries fit in a program's rows, and its heads are in tiles."""
    rows = batch.max_query_len * (q.shape[1] // kv.shape[2])
    return rows <= SHORT_ROWS and in_tiles(q.shape[2], q.dtype)


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
    kv_heads, page, dim = kv.shape[2:]
    group = q.shape[1] // kv_heads
    kept = triton.next_power_of_2(max(1, batch.max_query_len) * group)
    tile = min(tuning.tile, page)
    few = batch.num_sequences * kv_heads < FEW_PAIRS
    pdl = dependent(q.device if tuning.early and few else _NOWHERE)
    num = sm_count(q.device) * (1 if few else tuning.shares_per_sm)
    cut = Cut(num, kept, tile, tuning.pieces if few else tuning.pieces // 2, scores.window)
    shares, planned = shares_of(batch, kv, cut)
    scale, cap = scores.in_log2()
    decode_shares[(num,)](
        q,
        kv,
        batch.block_tables,
        batch.seq_lens,
        batch.cu_seqlens_q,
        out,
        shares.plan,
        shares.pieces,
        shares.stats,
        shares.arrivals,
        q.stride(0),
        q.stride(1),
        kv.stride(0),
        kv.stride(1),
        kv.stride(2),
        batch.block_tables.stride(0),
        kv.shape[0],
        scale,
        cap,
        scores.sinks,
        scores.slopes,
        kv_scales,
        KV_HEADS=kv_heads,
        GROUP=group,
        D=dim,
        WIDTH=padded(dim),
        PAGE=page,
        TILE=tile,
        WINDOW=scores.window or 0,
        ROWS=max(16, kept),
        KEPT=kept,
        WIDE=max(2, 32 // kept),
        FIELDS=PLAN_FIELDS,
        SPACING=COUNTER_STRIDE,
        STAGES=tuning.stages,
        AHEAD=pdl["PDL"] and planned,
        RELEASE=dependent(q.device)["PDL"],
        num_warps=tuning.warps,
        **pdl,
    )


DEFAULT = Tuning()
BY_BYTES = {1024: Tuning(shares_per_sm=1, tile=32, stages=2, warps=8)}
"""Tuning by bytes of a padded head, for those that DEFAULT's tiles do not fit in shared memory."""


def tuning_of(q: Tensor) -> Tuning:
    """Return the tuning for the head size and dtype of `q`, in which tiles are multiplied."""
    return BY_BYTES.get(padded(q.shape[2]) * q.element_size(), DEFAULT)
