"""The choice: the best token of a row, or one drawn from the softmax of its logits.

A draw first picks a group of GROUP ids (argmax of its probability mass over exponential noise),
then a token in it (argmax of logit - log of exponential noise). Both are the Gumbel-max trick, so
the distribution is exactly the softmax's, with noise for few tokens (docs/decisions). Noise depends
on the draw's key and the index only.
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
    """Return the first maximum of each row of float32, bfloat16 or float16 logits: int64 [rows]."""
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
    """Draw one token each from softmax(logits / temperature) at or above `floor`: int64 [draws].

    logits are float32, bfloat16 or float16 [rows, vocabulary]. keys (from `row_keys`) and rows are
    int64 [draws]; draws may share a row. temperature is float32 [rows], above 0, None is 1. floor
    is float32 [rows] from `thresholds`; None keeps all. -inf is only drawn if nothing else is left.
    """
    check_logits(logits)
    checks.shape("rows", rows, keys.shape[0])
    for name, numbers in (("keys", keys), ("rows", rows)):
        checks.kind(name, numbers, torch.int64)
    check_rows("temperature", temperature, logits)
    check_rows("floor", floor, logits)
    return DRAW.on(logits.device, backend)(logits, keys, rows, temperature, floor)
