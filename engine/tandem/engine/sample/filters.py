"""The stage that drops unlikely tokens from a draw: min-p, then top-k, then top-p."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tandem.engine.sample.batch import SamplingBatch
from tandem.engine.sample.transfer import on_device
from tandem.kernels.sampling import Filters, thresholds


def floors_of(
    logits: Tensor, temperature: Tensor, batch: SamplingBatch, rows: Sequence[int]
) -> Tensor:
    """The lowest logit over the temperature that each row's filters keep: float32 [rows].

    ``logits`` [rows, vocabulary] and ``temperature`` [rows] go with ``rows`` of the batch. Each
    filter keeps what is at or above one value, so equals stay or go together.
    """
    index, device = torch.tensor(rows), logits.device
    filters = Filters(
        min_p=on_device(batch.min_p[index], device),
        top_k=on_device(batch.top_k[index], device),
        top_p=on_device(batch.top_p[index], device),
    )
    return thresholds(logits, filters, temperature=temperature)
