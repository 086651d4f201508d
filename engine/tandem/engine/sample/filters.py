"""The stage that drops unlikely tokens from a draw: min-p, then top-k, then top-p."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tandem.engine.sample.batch import SamplingBatch
from tandem.engine.sample.transfer import on_device
from tandem.kernels.sampling import Filters, thresholds


def drop_unlikely(logits: Tensor, batch: SamplingBatch, rows: Sequence[int]) -> None:
    """-inf for what the rows' filters drop, in place.

    ``logits`` are float32 [rows, vocabulary], over the temperature; ``rows`` are the batch's. Each
    filter keeps what is at or above one value, so equals stay or go together.
    """
    index, device = torch.tensor(rows), logits.device
    filters = Filters(
        min_p=on_device(batch.min_p[index], device),
        top_k=on_device(batch.top_k[index], device),
        top_p=on_device(batch.top_p[index], device),
    )
    floor = thresholds(logits, filters)
    logits.masked_fill_(logits < floor.unsqueeze(1), -math.inf)
