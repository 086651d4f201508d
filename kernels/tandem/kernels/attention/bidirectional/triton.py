"""Bidirectional attention in Triton, for any GPU.

One program for a tile of queries of one head. Tiles are counted by the longest sequence; those past
the end of a shorter one return at once. Roofline: 4 * len^2 * head_dim products a head; at lengths
of some hundred tokens the layer's linear products outweigh them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from .triton_kernels import attend_tiles


@dataclass(frozen=True, slots=True)
class Tuning:
    """Tile sizes and pipelining."""

    rows: int = 64
    keys: int = 64
    warps: int = 4
    stages: int = 3


DEFAULT = Tuning()
LEAST_DIM = 16
"""Columns that a tile's product has at least."""


def bidirectional(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_len: int, scale: float
) -> Tensor:
    """See the wrapper."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    launch(q, k, v, cu_seqlens, max_len, scale, out, DEFAULT)
    return out


def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_len: int,
    scale: float,
    out: Tensor,
    tuning: Tuning,
) -> None:
    """Fill `out`."""
    _, heads, dim = q.shape
    grid = (triton.cdiv(max_len, tuning.rows), heads, cu_seqlens.shape[0] - 1)
    if not all(grid):
        return
    attend_tiles[grid](
        q,
        k,
        v,
        cu_seqlens,
        out,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        scale * math.log2(math.e),
        HEADS=heads,
        D=dim,
        WIDTH=max(LEAST_DIM, triton.next_power_of_2(dim)),
        BM=tuning.rows,
        BN=tuning.keys,
        STAGES=tuning.stages,
        EXACT=q.dtype == torch.float32,
        num_warps=tuning.warps,
    )
