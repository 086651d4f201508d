"""Thresholds of the filters in Triton: five launches for any filters and rows.

Roofline: the logits read once; a row that only top-p cuts reads part of them twice more, from L2 if
they fit. Rows without a filter leave early on the device.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from tandem.kernels.launch import dependent
from tandem.kernels.sampling.race.triton import stats_of
from tandem.kernels.sampling.rng import GROUP
from tandem.kernels.sampling.types import Filters

from .triton_kernels import FIELDS, PARTS, bound_rows, gather_rows, search_rows, weigh_rows

BLOCK = 256
"""Values that are few enough to weigh each against all."""
WIDE = 4096
"""Values loaded per iteration of a pass over more values."""
AGAINST = 16
"""Values compared with them per iteration."""
ROUNDS = 1
"""Passes that narrow the bracket before its logits are gathered."""
STEPS = 8
"""Loads of a program of such a pass, of WEIGHED groups each."""
WEIGHED = 8


def thresholds(logits: Tensor, filters: Filters, temperature: Tensor | None) -> Tensor:
    """See the wrapper."""
    rows, vocab = logits.shape
    device, pdl = logits.device, dependent(logits.device)
    floors = torch.empty(rows, dtype=torch.float32, device=device)
    if not rows:
        return floors
    peaks, masses, _ = stats_of(logits, temperature)
    groups = peaks.shape[1]
    chunks = triton.cdiv(groups, STEPS * WEIGHED)
    facts = torch.empty(rows, FIELDS.value, dtype=torch.float32, device=device)
    partials = torch.empty(rows, ROUNDS, chunks, PARTS.value, dtype=torch.float32, device=device)
    found = torch.empty(rows, 2, vocab, dtype=torch.float32, device=device)
    kinds, cursors = torch.empty(2, rows, dtype=torch.int32, device=device)
    bound_rows[(rows,)](
        *(peaks, masses, *filters, floors, facts, kinds, cursors, vocab, groups),
        GROUPS=triton.next_power_of_2(groups),
        num_warps=8,
        **pdl,
    )
    source = (logits, logits if temperature is None else temperature, peaks, filters.top_p)
    constants = {
        "ROUNDS": ROUNDS,
        "CHUNKS": triton.next_power_of_2(chunks),
        **pdl,
    }
    on_logits = {"GROUP": GROUP, "SCALED": temperature is not None, **constants}
    for turn in range(ROUNDS):
        weigh_rows[(chunks, rows)](
            *source,
            *(facts, kinds, partials, logits.stride(0), vocab, groups, chunks),
            AT_ONCE=WEIGHED,
            STEPS=STEPS,
            ROUND=turn,
            LANES=128,
            **on_logits,
        )
    gather_rows[(chunks, rows)](
        *source,
        *(facts, kinds, partials, cursors, found, logits.stride(0), vocab, groups, chunks),
        AT_ONCE=WEIGHED,
        STEPS=STEPS,
        **on_logits,
    )
    search_rows[(rows,)](
        *(filters.top_k, filters.top_p, floors, facts, kinds, partials, cursors, found),
        *(vocab, chunks),
        BLOCK=min(BLOCK, triton.next_power_of_2(vocab)),
        AT_ONCE=AGAINST,
        WIDE=min(WIDE, triton.next_power_of_2(vocab)),
        num_warps=8,
        **constants,
    )
    return floors
