"""Shares of a batch for both decode kernels, planned once a step on the device.

Plan and workspace are in the batch's memo. A layer is one launch whose grid depends on the device
only, so a CUDA graph of it serves any lengths.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
import triton
from torch import Tensor

from tandem.kernels.attention.batch import PagedBatch, sequence_class
from tandem.kernels.launch import dependent

from .plan_kernels import COUNTER_STRIDE, PLAN_FIELDS, plan_shares


@dataclass(frozen=True, slots=True)
class Cut:
    """Parameters of a batch's cut; layers with an equal one share its plan."""

    num: int
    """Number of shares, one a program."""
    kept: int
    """Rows of a piece: a power of two that holds the queries × group of every sequence."""
    tile: int
    """Tokens of a unit."""
    pieces: int
    """Pieces of a (sequence, head) beyond which shares grow, for 4 rows; fewer for more rows, more
    for many tiles."""
    window: int | None = None
    """Keys that a query attends to; None is all."""


@dataclass(frozen=True, slots=True)
class Shares:
    """A planned batch: each program's start, and workspace for the pieces of pairs that are cut."""

    plan: Tensor
    """int32 [shares, PLAN_FIELDS]."""
    pieces: Tensor
    """float32 [shares, 2, kept, head_dim]: rows before normalisation."""
    stats: Tensor
    """float32 [shares, 2, kept, 2]: maximum and sum of each row."""
    arrivals: Tensor
    """int32 [sequences, kv_heads, COUNTER_STRIDE], of which the first counts the finished shares of
    a pair; zero between launches."""


def shares_of(batch: PagedBatch, kv: Tensor, cut: Cut) -> tuple[Shares, bool]:
    """Return the batch's shares, and whether an earlier layer had planned them."""
    key = ("decode.shares", kv.shape, cut)
    planned = key in batch.memo
    if not planned:
        batch.memo[key] = _plan(batch, kv, cut)
    return cast("Shares", batch.memo[key]), planned


def _plan(batch: PagedBatch, kv: Tensor, cut: Cut) -> Shares:
    num_blocks, _, kv_heads, page, dim = kv.shape
    device = batch.seq_lens.device
    shares = Shares(
        torch.empty(cut.num, PLAN_FIELDS, dtype=torch.int32, device=device),
        torch.empty(cut.num, 2, cut.kept, dim, dtype=torch.float32, device=device),
        torch.empty(cut.num, 2, cut.kept, 2, dtype=torch.float32, device=device),
        torch.empty(
            batch.num_sequences, kv_heads, COUNTER_STRIDE, dtype=torch.int32, device=device
        ),
    )
    per_program = 16
    plan_shares[(triton.cdiv(cut.num, per_program),)](
        batch.seq_lens,
        batch.cu_seqlens_q,
        batch.block_tables,
        shares.plan,
        shares.arrivals,
        batch.num_sequences,
        cut.num,
        max(4, cut.pieces * 12 // (8 + cut.kept)),
        batch.block_tables.stride(0),
        num_blocks,
        KV_HEADS=kv_heads,
        PAGE=page,
        TILE=cut.tile,
        WINDOW=cut.window or 0,
        SEQS=sequence_class(batch.num_sequences),
        SHARES=per_program,
        FIELDS=PLAN_FIELDS,
        SPACING=COUNTER_STRIDE,
        num_warps=4,
        **dependent(device),
    )
    return shares
