"""Bidirectional attention in Triton, for any GPU.

A program computes a tile of queries of one head, from a list of tiles that a step's layers share,
so that lengths may differ. Roofline: 4 * len^2 * head_dim products a head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from tandem.kernels.attention.bidirectional.prompts import WholePrompts
from tandem.kernels.launch.launcher import Launcher

from .triton_kernels import attend_tiles

_attend_tiles = Launcher(attend_tiles)


@dataclass(frozen=True, slots=True)
class Tuning:
    """Tile sizes and pipelining."""

    rows: int = 64
    keys: int = 64
    warps: int = 4
    stages: int = 3


DEFAULT = Tuning()
NARROW = Tuning(rows=128, keys=64, warps=8, stages=3)
"""Tuning of heads of up to 64 in 16 bits."""
NARROW_DIM = 64
LEAST_DIM = 16
"""Minimum columns of a tile's product."""


def bidirectional(q: Tensor, k: Tensor, v: Tensor, prompts: WholePrompts, scale: float) -> Tensor:
    """See the wrapper."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    narrow = q.shape[2] <= NARROW_DIM and q.element_size() == 2
    launch(q, k, v, prompts, scale, out, NARROW if narrow else DEFAULT)
    return out


def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prompts: WholePrompts,
    scale: float,
    out: Tensor,
    tuning: Tuning,
) -> None:
    """Fill `out`."""
    tokens, heads, dim = q.shape
    tiles = prompts.tiles(tokens, tuning.rows)
    if not tiles.shape[0] or not heads:
        return
    _attend_tiles(
        (tiles.shape[0], heads),
        q,
        k,
        v,
        tiles,
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
