"""Thresholds of min-p, top-k and top-p in plain torch.

For top-p a partial top-k of growing size finds the best tokens; nearly flat distributions are
sorted.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tandem.kernels.sampling.race.reference import kept
from tandem.kernels.sampling.types import Filters

_PREFIXES = (256, 4096)
"""Numbers of best tokens that are tried before the whole vocabulary is sorted."""


def thresholds(logits: Tensor, filters: Filters, temperature: Tensor | None) -> Tensor:
    """See the wrapper."""
    floors = [
        _row_floor(row, min_p, top_k, top_p)
        for row, min_p, top_k, top_p in zip(
            kept(logits, temperature, None),
            filters.min_p.tolist(),
            filters.top_k.tolist(),
            filters.top_p.tolist(),
            strict=True,
        )
    ]
    return torch.tensor(floors, dtype=torch.float32, device=logits.device)


def _row_floor(row: Tensor, min_p: float, top_k: int, top_p: float) -> float:
    floor = -math.inf
    if min_p > 0:
        floor = float((row.max() + math.log(min_p)).clamp(max=row.max()))
    if 0 < top_k < row.numel():
        floor = max(floor, float(row.topk(top_k).values[-1]))
    return max(floor, _nucleus(row, floor, top_p)) if top_p < 1 else floor


def _nucleus(row: Tensor, floor: float, top_p: float) -> float:
    """Return the lowest logit of the smallest set of best tokens with probability `top_p`."""
    left = row if floor == -math.inf else row.masked_fill(row < floor, -math.inf)
    total = left.logsumexp(-1)
    for size in (*_PREFIXES, row.numel()):
        best = left.topk(min(size, row.numel())).values
        reached = (best - total).exp_().cumsum(-1) >= top_p
        if bool(reached[-1]):
            return float(best[int(reached.byte().argmax())])
    return floor
