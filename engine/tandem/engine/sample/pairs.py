"""(row, token) pairs of many rows, so that a stage touches all of them with one operation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.engine.sample.transfer import on_device


class Pairs(NamedTuple):
    """Places in logits [rows, vocabulary]; usable as an index."""

    rows: Tensor
    """int64 [pairs]."""
    tokens: Tensor
    """int64 [pairs]."""


def pairs_of(rows: Sequence[int], tokens: Sequence[Tensor], device: torch.device) -> Pairs:
    """Each row of ``rows`` with each token of its entry in ``tokens`` (int64, at least one row)."""
    counts = torch.tensor([each.numel() for each in tokens])
    repeated = torch.tensor(rows).repeat_interleave(counts)
    return Pairs(on_device(repeated, device), on_device(torch.cat(list(tokens)), device))
