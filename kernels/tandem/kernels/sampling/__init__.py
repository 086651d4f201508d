"""Ops of the sampler: bits of grammars, penalties, thresholds, the choice, log-probabilities.

Each treats every row of logits [rows, vocabulary] separately, so that a result does not depend on
the batch, and none waits for the device.
"""

from __future__ import annotations

from .bits import LOWEST, keep_bits
from .columns import Columns, Gathered, gather
from .filters import thresholds
from .penalties import penalize
from .race import best, draw
from .rng import GROUP, GROUP_NOISE, Purpose, row_keys
from .scores import score_tokens
from .types import Filters, Penalties, TokenScores

__all__ = [
    "GROUP",
    "GROUP_NOISE",
    "LOWEST",
    "Columns",
    "Filters",
    "Gathered",
    "Penalties",
    "Purpose",
    "TokenScores",
    "best",
    "draw",
    "gather",
    "keep_bits",
    "penalize",
    "row_keys",
    "score_tokens",
    "thresholds",
]
