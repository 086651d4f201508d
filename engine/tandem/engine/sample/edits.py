"""Every stage that changes logits before the choice, in order: masks, bias, penalties."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tandem.engine.sample.batch import SamplingBatch
from tandem.engine.sample.bias import add_bias
from tandem.engine.sample.masks import mask
from tandem.engine.sample.penalties import add_penalties


def edit(
    logits: Tensor, batch: SamplingBatch, rows: Sequence[int], positions: Sequence[int]
) -> None:
    """Apply the rules of batch rows ``rows``, in place on float32 [rows, vocabulary].

    ``positions`` are the output positions that the rows are drawn for.
    """
    rules = [batch.rules_at(row, at) for row, at in zip(rows, positions, strict=True)]
    if any(each is not None for each in rules):
        mask(logits, rules, positions)
        add_bias(logits, rules)
        add_penalties(logits, rules, batch, rows)
