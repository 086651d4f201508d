"""Paged decode attention in Gluon for Hopper: the ring's size, descriptors and launch.

Uses the shares and workspace of triton.py. Its shared memory limits the programs per
multiprocessor, so they may always start before the kernel ahead has ended.

Roofline: bytes of K and V over the memory's read rate; see bench/results/attention_h200.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from tandem.kernels.attention.batch import PagedBatch, Scores
from tandem.kernels.attention.descriptors import TokenRows
from tandem.kernels.launch import dependent, generation, sm_count
from tandem.kernels.launch.launcher import Launcher

from . import triton as plain
from .gluon_kernels import decode_stream
from .plan import Cut, shares_of
from .plan_kernels import COUNTER_STRIDE, PLAN_FIELDS

_decode_stream = Launcher(decode_stream)
TILE = 64
"""Tokens of a unit: the long side of the matrix instruction."""
ROWS_MAX = 16
"""Query rows (tokens × query heads of a KV head) for which two programs fit a multiprocessor."""
REGISTERS = 128
"""Registers of a thread, of eight warps; the four that multiply take those left by the producer."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """Launch parameters for one device; measured in bench/results/attention_h200.md."""

    ring: int = 96 << 10
    """Bytes of K and V in a program's ring."""
    shares_per_sm: int = 2
    pieces: int = 8
    """Pieces of a (sequence, head) beyond which shares grow, for 4 rows; fewer for more rows."""
    early: bool = True
    """Whether programs fill their rings before the kernel ahead has ended."""
    producer_registers: int = 24


DEFAULT = Tuning()


def decode(
    q: Tensor, kv: Tensor, batch: PagedBatch, scores: Scores, kv_scales: Tensor | None
) -> Tensor:
    """See the wrapper; other calls than ``takes`` go to the plain Triton kernel."""
    if not takes(q, kv, batch, scores):
        return plain.decode(q, kv, batch, scores, kv_scales)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    launch(q, kv, batch, scores, out, DEFAULT, kv_scales)
    return out


def takes(q: Tensor, kv: Tensor, batch: PagedBatch, scores: Scores) -> bool:
    """Return whether the kernel supports a call: Hopper, 16-bit queries, pages of their type or of
    codes, head size 64 or 128, pages of whole tiles, few query rows, scores without caps, sinks and
    slopes."""
    return (
        generation(q.device) == 9
        and scores.plain
        and q.dtype in (torch.bfloat16, torch.float16)
        and kv.dtype in (q.dtype, torch.float8_e4m3fn)
        and kv.shape[4] in (64, 128)
        and kv.shape[3] % TILE == 0
        and kept_rows(q, kv, batch) <= ROWS_MAX
        and kv.data_ptr() % 16 == 0
    )


def kept_rows(q: Tensor, kv: Tensor, batch: PagedBatch) -> int:
    """Return the power of two that holds the query rows of every sequence."""
    rows = max(1, batch.max_query_len) * (q.shape[1] // kv.shape[2])
    return int(triton.next_power_of_2(rows))


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
    kept = kept_rows(q, kv, batch)
    num = sm_count(q.device) * tuning.shares_per_sm
    shares, planned = shares_of(batch, kv, Cut(num, kept, TILE, tuning.pieces, scores.window))
    rows = TokenRows.of(kv)
    pdl = dependent(q.device)
    _decode_stream(
        (num,),
        rows.boxes(TILE),
        rows.boxes(TILE // 4),
        q,
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
        batch.block_tables.stride(0),
        rows.block,
        rows.two,
        rows.head,
        scores.in_log2()[0],
        q if kv_scales is None else kv_scales,
        KV_HEADS=kv_heads,
        GROUP=q.shape[1] // kv_heads,
        D=dim,
        PAGE=page,
        TILE=TILE,
        WINDOW=scores.window or 0,
        N=max(8, kept),
        KEPT=kept,
        WIDE=max(2, 32 // kept),
        STAGES=tuning.ring // (TILE * dim * 2 * kv.element_size()),
        FIELDS=PLAN_FIELDS,
        SPACING=COUNTER_STRIDE,
        CODES=kv_scales is not None,
        PRODUCER_REGS=tuning.producer_registers,
        AHEAD=pdl["PDL"] and planned and tuning.early,
        num_warps=4,
        maxnreg=REGISTERS,
        **pdl,
    )
