"""Log-probabilities of chosen and of the best tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tandem.kernels import checks
from tandem.kernels.registry import Backend, Op
from tandem.kernels.sampling.checking import check_logits
from tandem.kernels.sampling.types import TokenScores

_HERE = "tandem.kernels.sampling.scores"
SCORE: Op[Callable[[Tensor, Tensor, int], TokenScores]] = Op(
    "sampling.score_tokens",
    {
        Backend.TORCH: f"{_HERE}.reference:score_tokens",
        Backend.TRITON: f"{_HERE}.triton:score_tokens",
    },
)


def score_tokens(
    logits: Tensor, ids: Tensor, top: int, *, backend: Backend | None = None
) -> TokenScores:
    """Return log-probability and rank of one token a row, and of the `top` best.

    logits are float32, bfloat16 or float16 [rows, vocabulary], scored in float32; ids int64 [rows].
    `top` is at most the vocabulary; 0 is none.
    """
    check_logits(logits)
    checks.shape("ids", ids, logits.shape[0])
    checks.kind("ids", ids, torch.int64)
    return SCORE.on(logits.device, backend)(logits, ids, min(top, logits.shape[1]))
