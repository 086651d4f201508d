"""The stage that makes tokens less likely that the row has seen."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tandem.engine.sample.batch import SamplingBatch
from tandem.engine.sample.pairs import pairs_of
from tandem.engine.sample.rules import RowRules
from tandem.engine.sample.transfer import on_device
from tandem.kernels.sampling import Penalties, penalize


def add_penalties(
    logits: Tensor, rules: Sequence[RowRules | None], batch: SamplingBatch, rows: Sequence[int]
) -> None:
    """Repetition (prompt and output), then frequency and presence (output), in place.

    ``logits`` are float32 [rows, vocabulary]; ``rules`` and ``rows`` (of the batch) go with them.
    """
    seen = {
        row: each.seen
        for row, each in enumerate(rules)
        if each is not None and each.seen is not None and each.seen.tokens.numel()
    }
    if not seen:
        return
    device, columns = logits.device, torch.tensor(rows)
    places = pairs_of(list(seen), [each.tokens for each in seen.values()], device)
    penalties = Penalties(
        rows=places.rows,
        tokens=places.tokens,
        counts=on_device(torch.cat([each.counts for each in seen.values()]), device),
        repetition=on_device(batch.repetition[columns], device),
        frequency=on_device(batch.frequency[columns], device),
        presence=on_device(batch.presence[columns], device),
    )
    penalize(logits, penalties)
