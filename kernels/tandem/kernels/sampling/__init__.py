"""Ops of the sampler: penalties, thresholds of the filters, the draw, log-probabilities.

Each works on float32 logits [rows, vocabulary] and treats every row by itself, so that a row's
result does not depend on the batch around it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tandem.kernels import checks
from tandem.kernels.registry import Backend, Op

from .rng import Purpose, row_keys
from .types import Filters, Penalties, TokenScores

__all__ = [
    "Filters",
    "Penalties",
    "Purpose",
    "TokenScores",
    "draw",
    "penalize",
    "row_keys",
    "score_tokens",
    "thresholds",
]

_HERE = "tandem.kernels.sampling"
PENALIZE: Op[Callable[[Tensor, Penalties], None]] = Op(
    "sampling.penalize", {Backend.TORCH: f"{_HERE}.penalties:penalize"}
)
THRESHOLDS: Op[Callable[[Tensor, Filters], Tensor]] = Op(
    "sampling.thresholds", {Backend.TORCH: f"{_HERE}.filters:thresholds"}
)
DRAW: Op[Callable[[Tensor, Tensor, Tensor | None], Tensor]] = Op(
    "sampling.draw", {Backend.TORCH: f"{_HERE}.drawing:draw"}
)
SCORE: Op[Callable[[Tensor, Tensor, int], TokenScores]] = Op(
    "sampling.score_tokens", {Backend.TORCH: f"{_HERE}.scoring:score_tokens"}
)


def penalize(logits: Tensor, penalties: Penalties, *, backend: Backend | None = None) -> None:
    """Repetition, frequency and presence penalties, in place on float32 [rows, vocabulary]."""
    _check(logits)
    PENALIZE.on(logits.device, backend)(logits, penalties)


def thresholds(logits: Tensor, filters: Filters, *, backend: Backend | None = None) -> Tensor:
    """The lowest logit that each row keeps under min-p, then top-k, then top-p.

    A filter keeps the logits at or above one value, so all three are one number a row. Tokens equal
    to the boundary are all kept, which makes the result free of any order among equals.

    Args:
        logits: float32 [rows, vocabulary], already divided by the temperature.
        filters: one value of each kind per row.
        backend: an explicit choice; by device otherwise.

    Returns:
        float32 [rows]; -inf where everything is kept.
    """
    _check(logits)
    for name, values in zip(filters._fields, filters, strict=True):
        checks.shape(name, values, logits.shape[0])
    return THRESHOLDS.on(logits.device, backend)(logits, filters)


def draw(
    logits: Tensor, keys: Tensor, floor: Tensor | None = None, *, backend: Backend | None = None
) -> Tensor:
    """One token a row from softmax(logits) over the logits that are at or above `floor`.

    The Gumbel-max trick: argmax(logit - log E), E exponential noise that depends on the row's key
    and the token id alone. So the draw is the same in any batch, on any device, filtered or not as
    long as the winner is kept.

    Args:
        logits: float32 [rows, vocabulary]; -inf is never drawn.
        keys: int64 [rows], from `row_keys`.
        floor: float32 [rows], from `thresholds`, or None.
        backend: an explicit choice; by device otherwise.

    Returns:
        int64 [rows].
    """
    _check(logits)
    checks.shape("keys", keys, logits.shape[0])
    checks.kind("keys", keys, torch.int64)
    return DRAW.on(logits.device, backend)(logits, keys, floor)


def score_tokens(
    logits: Tensor, ids: Tensor, top: int, *, backend: Backend | None = None
) -> TokenScores:
    """Log-probability and rank of one token a row, and of the `top` best.

    Args:
        logits: float32 [rows, vocabulary].
        ids: int64 [rows].
        top: how many of the best to return, at most the vocabulary; 0 is none.
        backend: an explicit choice; by device otherwise.
    """
    _check(logits)
    checks.shape("ids", ids, logits.shape[0])
    checks.kind("ids", ids, torch.int64)
    return SCORE.on(logits.device, backend)(logits, ids, top)


def _check(logits: Tensor) -> None:
    checks.shape("logits", logits, None, None)
    checks.kind("logits", logits, torch.float32)
    checks.dense_last("logits", logits)
