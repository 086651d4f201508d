"""Arguments and results of the sampling ops."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Penalties(NamedTuple):
    """Tokens that rows have seen, as (row, token) pairs without repeats."""

    rows: Tensor
    """int64 [pairs]."""
    tokens: Tensor
    """int64 [pairs]."""
    counts: Tensor
    """float32 [pairs], times the token was emitted; 0 if only the prompt has it."""
    repetition: Tensor
    """float32 [rows]: divides a positive logit of a seen token, multiplies a negative; 1 is off."""
    frequency: Tensor
    """float32 [rows]: subtracted per emission; 0 is off."""
    presence: Tensor
    """float32 [rows]: subtracted once if emitted; 0 is off."""


class Filters(NamedTuple):
    """Filters of each row, applied in this order."""

    min_p: Tensor
    """float32 [rows], share of the best token's probability; 0 is off."""
    top_k: Tensor
    """int64 [rows]; 0 is off."""
    top_p: Tensor
    """float32 [rows], probability to reach among what is left; 1 is off."""


class TokenScores(NamedTuple):
    """Log-probabilities, natural logarithm."""

    logprobs: Tensor
    """float32 [rows], of the given tokens."""
    ranks: Tensor
    """int64 [rows], 1 for the best; equals share the better rank."""
    top_ids: Tensor
    """int64 [rows, top], best first."""
    top_logprobs: Tensor
    """float32 [rows, top]."""
