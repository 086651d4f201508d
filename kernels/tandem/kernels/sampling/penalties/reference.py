"""Penalties in plain torch: only the logits of seen tokens are touched."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.kernels.sampling.types import Penalties


def penalize(logits: Tensor, penalties: Penalties) -> None:
    """See the wrapper."""
    rows, tokens, counts = penalties.rows, penalties.tokens, penalties.counts
    seen = logits[rows, tokens]
    repetition = penalties.repetition[rows]
    seen = torch.where(seen > 0, seen / repetition, seen * repetition)
    seen -= penalties.frequency[rows] * counts
    seen -= penalties.presence[rows] * (counts > 0)
    logits[rows, tokens] = seen
