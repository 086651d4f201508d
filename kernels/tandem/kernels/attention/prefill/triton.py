"""Paged prefill attention in Triton, for any GPU; batches of few queries go to the decode kernel.

Any mix of prompts and chunks in one launch, over the tiles that plan.py lists on the device. On
Hopper and later the pages come by tensor descriptors, a tile a copy. Roofline as in gluon.py;
bench/results/attention_h200.md says how far from that kernel it is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tandem.kernels.attention.batch import PagedBatch
from tandem.kernels.attention.decode import triton as decode_triton

from . import reference
from .plan import tiles_of
from .plan_kernels import PLAN_FIELDS
from .triton_kernels import prefill_tiles


@dataclass(frozen=True, slots=True)
class Tuning:
    """Tile sizes and pipelining; measured by bench/kernels/prefill_attention.py."""

    rows: int = 64
    keys: int = 64
    warps: int = 4
    stages: int = 3
    descriptors: bool = False
    """Whether pages are copied by tensor descriptors."""


DEFAULT = Tuning()
WITH_DESCRIPTORS = Tuning(128, 64, 8, 3, descriptors=True)


def prefill(q: Tensor, kv: Tensor, batch: PagedBatch, scale: float) -> Tensor:
    """See the wrapper; a head size that is no power of two is left to the reference."""
    dim = q.shape[2]
    if dim & (dim - 1):
        return reference.prefill(q, kv, batch, scale)
    if decode_triton.fits(q, kv, batch):
        return decode_triton.decode(q, kv, batch, scale)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    launch(q, kv, batch, scale, out, WITH_DESCRIPTORS if describable(kv) else DEFAULT)
    return out


def describable(kv: Tensor) -> bool:
    """Whether tensor descriptors can copy the pages: Hopper or later, 16-bit, aligned."""
    return (
        kv.is_cuda
        and torch.cuda.get_device_capability(kv.device)[0] >= 9
        and kv.dtype in (torch.bfloat16, torch.float16)
        and kv.shape[4] in (64, 128, 256)
        and kv.shape[3] % 16 == 0
        and kv.data_ptr() % 16 == 0
    )


def launch(
    q: Tensor, kv: Tensor, batch: PagedBatch, scale: float, out: Tensor, tuning: Tuning
) -> None:
    """Plan the batch unless a layer before did, and fill `out`."""
    heads, dim = q.shape[1:]
    kv_heads, page = kv.shape[2:4]
    tiles = tiles_of(batch, q.shape[0], tuning.rows)
    keys = min(tuning.keys, page)
    prefill_tiles[(heads, tiles.most)](
        q,
        kv,
        _describe(kv, keys) if tuning.descriptors else kv,
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
        BN=keys,
        TMA=tuning.descriptors,
        STAGES=tuning.stages,
        FIELDS=PLAN_FIELDS,
        num_warps=tuning.warps,
    )


def _describe(kv: Tensor, keys: int) -> TensorDescriptor:
    """A layer's pages as rows of head_dim, copied `keys` rows at a time."""
    dim = kv.shape[4]
    last = sum((kv.shape[d] - 1) * kv.stride(d) for d in (0, 1, 2)) // dim + kv.shape[3]
    return TensorDescriptor(kv, [last, dim], [dim, 1], [keys, dim])
