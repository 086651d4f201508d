"""The choice: the best token of a row, or one drawn from the softmax of its logits.

Drawing is a race in two legs (docs/decisions: how a token is drawn). Tokens lie in groups of GROUP
by id. Leg one picks a group: argmax of (its probability mass over exponential noise). Leg two picks
a token in it: argmax of (logit - log of exponential noise). Both are the Gumbel-max trick, so the
outcome has exactly the softmax's distribution, while noise is made for groups and one group's
tokens instead of the whole vocabulary. Noise comes from the draw's key and the index alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tandem.kernels import checks
from tandem.kernels.registry import Backend, Op
from tandem.kernels.sampling.checking import check_logits, check_rows

Best = Callable[[Tensor], Tensor]
Draw = Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor | None], Tensor]

_HERE = "tandem.kernels.sampling.race"
BEST: Op[Best] = Op(
    "sampling.best",
    {Backend.TORCH: f"{_HERE}.reference:best", Backend.TRITON: f"{_HERE}.triton:best"},
)
DRAW: Op[Draw] = Op(
    "sampling.draw",
    {Backend.TORCH: f"{_HERE}.reference:draw", Backend.TRITON: f"{_HERE}.triton:draw"},
)


def best(logits: Tensor, *, backend: Backend | None = None) -> Tensor:
    """The first of each row's equal maxima: float32, bfloat16 or float16 logits to int64 [rows]."""
    check_logits(logits)
    return BEST.on(logits.device, backend)(logits)


def draw(
    logits: Tensor,
    keys: Tensor,
    rows: Tensor,
    *,
    temperature: Tensor | None = None,
    floor: Tensor | None = None,
    backend: Backend | None = None,
) -> Tensor:
    """One token a draw from softmax(logits / temperature) at or above `floor`.

    Several draws may share a row of logits.

    Args:
        logits: float32, bfloat16 or float16 [rows, vocabulary]; -inf is never drawn while anything
            else is there.
        keys: int64 [draws], from `row_keys`.
        rows: int64 [draws], the row of `logits` of each draw.
        temperature: float32 [rows], above 0; None is 1.
        floor: float32 [rows] in units of logits / temperature, from `thresholds`; None keeps all.
        backend: an explicit choice; by device otherwise.

    Returns:
        int64 [draws], always within the vocabulary.
    """
    check_logits(logits)
    checks.shape("rows", rows, keys.shape[0])
    for name, numbers in (("keys", keys), ("rows", rows)):
        checks.kind(name, numbers, torch.int64)
    check_rows("temperature", temperature, logits)
    check_rows("floor", floor, logits)
    return DRAW.on(logits.device, backend)(logits, keys, rows, temperature, floor)
