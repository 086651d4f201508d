"""Prompts sent as embeddings, which a step reads in place of the table's rows.

Vectors stay on the host; a step copies those of its own tokens to the device in their dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tandem.engine.models import EmbeddedTokens
from tandem.engine.sample.transfer import index_on, on_device
from tandem.engine.worker.inputs import StepRows
from tandem.protocol.embeds import PromptEmbeds

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_NUMBERS: dict[str, np.dtype[Any]] = {
    "float32": np.dtype("<i4"),
    "float16": np.dtype("<i2"),
    "bfloat16": np.dtype("<i2"),
}
"""Integers of the same width, as numpy knows no bfloat16."""


def embedded_tokens(
    held: Mapping[int, PromptEmbeds], rows: StepRows, device: torch.device
) -> EmbeddedTokens | None:
    """Return the tokens of an unpadded step that are embeddings; None if there are none.

    ``held`` are prompts by row of the batch.
    """
    places, vectors = [], []
    begins = (rows.ends + 1 - rows.counts).tolist()
    columns = zip(rows.index.tolist(), rows.first.tolist(), rows.lens.tolist(), strict=True)
    for at, (row, first, end) in zip(begins, columns, strict=True):
        embeds = held.get(row)
        if embeds is not None and first < embeds.num_tokens:
            own = vectors_of(embeds, first, min(end, embeds.num_tokens))
            vectors.append(on_device(own, device))
            places.append(np.arange(at, at + len(own)))
    if not places:
        return None
    return EmbeddedTokens(index_on(np.concatenate(places), device), vectors)


def vectors_of(embeds: PromptEmbeds, first: int, end: int) -> Tensor:
    """Return the vectors [positions, hidden_size] of positions [first, end), in new memory."""
    kind = _NUMBERS[embeds.dtype]
    numbers = np.frombuffer(embeds.rows(first, end), kind)
    native = numbers.astype(kind.newbyteorder("="), copy=True)
    return torch.from_numpy(native).view(_DTYPES[embeds.dtype]).view(-1, embeds.hidden_size)
