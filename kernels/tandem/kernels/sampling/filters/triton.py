"""Thresholds of the filters in Triton: four launches, whatever the filters and the rows.

Roofline: the logits read once, and once more where the distribution is flat. Nothing is read back
to the host: rows without a filter leave early on the device.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from tandem.kernels.launch import dependent
from tandem.kernels.sampling.race.triton import AT_ONCE, stats_of
from tandem.kernels.sampling.rng import GROUP
from tandem.kernels.sampling.types import Filters

from .triton_kernels import bound_rows, gather_rows, search_rows

BLOCK = 4096
"""Values that the search holds in registers."""
PIVOTS = 7


def thresholds(logits: Tensor, filters: Filters, temperature: Tensor | None) -> Tensor:
    """See the wrapper."""
    rows, vocab = logits.shape
    device, pdl = logits.device, dependent(logits.device)
    floors = torch.empty(rows, dtype=torch.float32, device=device)
    if not rows:
        return floors
    peaks, masses, _ = stats_of(logits, temperature)
    groups = peaks.shape[1]
    bounds = torch.empty_like(floors)
    sums = torch.empty(rows, 2, dtype=torch.float32, device=device)
    cursors = torch.empty(rows, dtype=torch.int32, device=device)
    found = torch.empty(rows, 2, vocab, dtype=torch.float32, device=device)
    bound_rows[(rows,)](
        *(peaks, masses, *filters, floors, bounds, sums, cursors, vocab, groups),
        GROUPS=triton.next_power_of_2(groups),
        num_warps=8,
        **pdl,
    )
    gather_rows[(triton.cdiv(groups, AT_ONCE), rows)](
        logits,
        logits if temperature is None else temperature,
        *(peaks, filters.top_k, filters.top_p, bounds, cursors, found),
        *(logits.stride(0), vocab, groups),
        GROUP=GROUP,
        AT_ONCE=AT_ONCE,
        SCALED=temperature is not None,
        **pdl,
    )
    block = min(BLOCK, triton.next_power_of_2(vocab))
    search_rows[(rows,)](
        *(filters.top_k, filters.top_p, floors, bounds, sums, cursors, found, vocab),
        BLOCK=block,
        PIVOTS=PIVOTS,
        num_warps=16,
        **pdl,
    )
    return floors
