"""Inputs of steps in addition to tokens, by kind: token types of pairs, and embeddings."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from tandem.engine.config import EngineConfig
from tandem.engine.models import CausalModel, EmbeddedTokens, TokenTypes
from tandem.engine.sample.transfer import index_on
from tandem.engine.step import NewSequence
from tandem.engine.worker.input_batch import RowInputs
from tandem.engine.worker.step_rows import StepRows
from tandem.engine.worker.vectors import embedded_tokens
from tandem.protocol.embeds import PromptEmbeds


def row_inputs(config: EngineConfig) -> tuple[RowInputs, ...]:
    """Return every kind that sequences of an engine may have."""
    return (PairedTexts(), PromptVectors())


class PairedTexts:
    """Prompts of two texts, whose tokens have types. Implements RowInputs."""

    def __init__(self) -> None:
        self._starts: dict[int, int] = {}
        """Start of the second text, by row."""

    def add(self, row: int, new: NewSequence) -> None:
        if new.pooling is not None and new.pooling.second_text_at is not None:
            self._starts[row] = new.pooling.second_text_at

    def drop(self, row: int) -> None:
        self._starts.pop(row, None)

    def of_step(self, rows: StepRows, model: CausalModel, on: torch.device) -> TokenTypes | None:
        """Return the types, 0 or 1, in a step of whole prompts."""
        if self._starts.keys().isdisjoint(rows.index.tolist()):
            return None
        return TokenTypes(index_on(self.types_of(rows), on))

    def types_of(self, rows: StepRows) -> NDArray[np.int64]:
        """Return each token's type."""
        types = np.zeros(rows.num_tokens, dtype=np.int64)
        ends = rows.ends + 1
        columns = zip(
            rows.index.tolist(), (ends - rows.counts).tolist(), ends.tolist(), strict=True
        )
        for row, begin, end in columns:
            types[begin + self._starts.get(row, end - begin) : end] = 1
        return types


class PromptVectors:
    """Prompts whose ids are placeholders of embeddings. Implements RowInputs."""

    def __init__(self) -> None:
        self._held: dict[int, PromptEmbeds] = {}

    def add(self, row: int, new: NewSequence) -> None:
        if new.prompt_embeds is not None:
            self._held[row] = new.prompt_embeds

    def drop(self, row: int) -> None:
        self._held.pop(row, None)

    def of_step(
        self, rows: StepRows, model: CausalModel, on: torch.device
    ) -> EmbeddedTokens | None:
        return embedded_tokens(self._held, rows, on) if self._held else None
