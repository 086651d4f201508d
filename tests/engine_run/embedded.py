"""Prompts of embeddings for tests: the rows that a model's own table has for ids."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tests.dense_model import dense_tensors

from tandem.protocol.embeds import PromptEmbeds

ZERO_SAID = [44 * at % 300 + 5 for at in range(70)]
"""Behind which the tiny Llama says id 0, the placeholders', as its third token."""


@cache
def table_of(folder: Path) -> torch.Tensor:
    """[vocabulary, hidden], as the checkpoint has it; blocks are decoded."""
    return dense_tensors(folder)["model.embed_tokens.weight"]


def embeds_of(rows: torch.Tensor) -> PromptEmbeds:
    """[positions, hidden] as a request carries it, in its own dtype."""
    values = rows.contiguous().view(torch.uint8).numpy().tobytes()
    return PromptEmbeds(str(rows.dtype).removeprefix("torch."), rows.shape[1], values)


def embeds_for(
    folder: Path, ids: Sequence[int], dtype: torch.dtype = torch.float32
) -> PromptEmbeds:
    """What the model's table says of ``ids``."""
    return embeds_of(table_of(folder)[list(ids)].to(dtype))


def penalized(model: Any, rows: torch.Tensor, count: int, penalty: float) -> list[int]:
    """Greedy tokens behind embeddings, by transformers, with a repetition penalty that looks at
    the output alone, since the prompt has no ids."""
    table = model.get_input_embeddings().weight
    said: list[int] = []
    with torch.inference_mode():
        for _ in range(count):
            behind = torch.cat([rows, table[said]])[None]
            logits = model(inputs_embeds=behind).logits[0, -1]
            for token in set(said):
                at = logits[token]
                logits[token] = at / penalty if at > 0 else at * penalty
            said.append(int(logits.argmax()))
    return said
