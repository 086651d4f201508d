"""Log-probabilities in Triton: one pass over the logits, then a small launch a row.

Roofline: the logits read once.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from tandem.kernels.launch import dependent
from tandem.kernels.sampling.race.triton import stats_of
from tandem.kernels.sampling.rng import GROUP
from tandem.kernels.sampling.types import TokenScores

from .triton_kernels import score_rows


def score_tokens(logits: Tensor, ids: Tensor, top: int) -> TokenScores:
    """See the wrapper."""
    rows, vocab = logits.shape
    scores = TokenScores(
        logprobs=torch.empty(rows, dtype=torch.float32, device=logits.device),
        ranks=torch.empty(rows, dtype=torch.int64, device=logits.device),
        top_ids=torch.empty(rows, top, dtype=torch.int64, device=logits.device),
        top_logprobs=torch.empty(rows, top, dtype=torch.float32, device=logits.device),
    )
    if rows:
        stats = stats_of(logits, chosen=ids)
        score_rows[(rows,)](
            logits,
            ids,
            stats.peaks,
            stats.masses,
            stats.above,
            *scores,
            logits.stride(0),
            vocab,
            stats.peaks.shape[1],
            top,
            GROUP=GROUP,
            GROUPS=triton.next_power_of_2(stats.peaks.shape[1]),
            num_warps=4,
            **dependent(logits.device),
        )
    return scores
