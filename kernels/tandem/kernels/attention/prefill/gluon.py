"""Paged prefill attention in Gluon for Hopper: descriptors, plan and launch.

Prompts and chunks in one launch: their tiles are planned on the device once a step (plan.py), over
a grid that depends on the device only.

Roofline: 4 * heads * head_dim * (query, key) pairs over the dense rate of the tensor cores; see
bench/results/attention_h200.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tandem.kernels.attention.batch import PagedBatch, Scores
from tandem.kernels.attention.decode import gluon as decode_gluon
from tandem.kernels.attention.decode import triton as decode_triton
from tandem.kernels.attention.descriptors import LAYOUT, TokenRows
from tandem.kernels.launch import generation, sm_count
from tandem.kernels.launch.launcher import Launcher

from . import triton as plain
from .gluon_kernels import prefill_tiles
from .plan import tiles_of
from .plan_kernels import PLAN_FIELDS

_prefill_tiles = Launcher(prefill_tiles)
ROWS = 128
"""Query rows of a tile: two warpgroups of 64."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """Build parameters of the kernel; measured in bench/results/attention_h200.md."""

    keys: int = 128
    stages: int = 2
    take_turns: bool = True
    consumer_registers: int = 240
    producer_registers: int = 24


DEFAULT = Tuning()


def prefill(
    q: Tensor, kv: Tensor, batch: PagedBatch, scores: Scores, kv_scales: Tensor | None
) -> Tensor:
    """See the wrapper; other calls than ``takes`` go to the plain Triton kernel, few queries a
    sequence to the decode kernel."""
    if decode_triton.fits(q, kv, batch):
        return decode_gluon.decode(q, kv, batch, scores, kv_scales)
    if not takes(q, kv, scores):
        return plain.prefill(q, kv, batch, scores, kv_scales)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    launch(q, kv, batch, scores, out, DEFAULT)
    return out


def takes(q: Tensor, kv: Tensor, scores: Scores) -> bool:
    """Return whether the kernel takes a call: Hopper, 16-bit pages, head size 64 or 128, pages that
    divide a tile, dense heads in q, scores without caps, sinks and slopes."""
    return (
        generation(q.device) == 9
        and scores.plain
        and q.dtype in (torch.bfloat16, torch.float16)
        and kv.dtype == q.dtype
        and kv.shape[4] in (64, 128)
        and DEFAULT.keys % kv.shape[3] == 0
        and q.stride(1) == kv.shape[4]
        and q.stride(0) % 8 == 0
        and q.data_ptr() % 16 == 0
        and kv.data_ptr() % 16 == 0
    )


def launch(
    q: Tensor, kv: Tensor, batch: PagedBatch, scores: Scores, out: Tensor, tuning: Tuning
) -> None:
    """Plan the batch unless an earlier layer did, and fill `out`."""
    heads, dim = q.shape[1:]
    kv_heads, page = kv.shape[2:4]
    tiles = tiles_of(batch, q.shape[0], ROWS, scores.window)
    q_desc = TensorDescriptor(
        q, [q.shape[0], heads * dim], [q.stride(0), 1], [ROWS // 2, dim], LAYOUT
    )
    rows = TokenRows.of(kv)
    grid = min(tiles.most * heads, sm_count(q.device))
    _prefill_tiles(
        (grid,),
        q_desc,
        rows.boxes(page),
        batch.block_tables,
        tiles.rows,
        tiles.count,
        out,
        batch.block_tables.stride(0),
        rows.block,
        rows.two,
        rows.head,
        scores.in_log2()[0],
        HEADS=heads,
        GROUP=heads // kv_heads,
        D=dim,
        PAGE=page,
        BN=tuning.keys,
        WINDOW=scores.window or 0,
        STAGES=tuning.stages,
        FIELDS=PLAN_FIELDS,
        PINGPONG=tuning.take_turns,
        CONSUMER_REGS=tuning.consumer_registers,
        PRODUCER_REGS=tuning.producer_registers,
        num_warps=4,
    )
