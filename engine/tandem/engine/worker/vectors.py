"""Prompt tokens that requests gave as vectors, in steps with and without CUDA graphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tandem.engine.models import EmbeddedTokens, StagedVectors
from tandem.engine.sample.transfer import index_on, on_device
from tandem.engine.worker.step_rows import StepRows
from tandem.protocol.embeds import PromptEmbeds

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_NUMBERS: dict[str, np.dtype[Any]] = {
    "float32": np.dtype("<i4"),
    "float16": np.dtype("<i2"),
    "bfloat16": np.dtype("<i2"),
}
"""Integers of the same width, as numpy knows no bfloat16."""


class VectorStage:
    """Vectors of the steps of CUDA graphs, at fixed addresses."""

    def __init__(self, max_tokens: int, hidden_size: int, device: torch.device) -> None:
        self._present = torch.zeros(max_tokens, 1, dtype=torch.bool, device=device)
        self._vectors = torch.zeros(max_tokens, hidden_size, device=device)
        self._is_clear = True

    def of(self, num_tokens: int) -> StagedVectors:
        """Return the vectors of a step of ``num_tokens`` tokens."""
        return StagedVectors(self._present[:num_tokens], self._vectors[:num_tokens])

    def fill(self, embedded: Sequence[EmbeddedTokens]) -> None:
        """Set the vectors of the next step, whose tokens are those of ``embedded``."""
        if not self._is_clear:
            self._present.zero_()
        self._is_clear = not embedded
        for tokens in embedded:
            self._present.index_fill_(0, tokens.index, True)
            vectors = torch.cat([each.float() for each in tokens.vectors])
            self._vectors.index_copy_(0, tokens.index, vectors)


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
