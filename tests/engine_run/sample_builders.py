"""Builders of batches for the sampler's tests."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tandem.engine.sample import Sampler, SamplerOutput, SamplingBatch
from tandem.protocol.sampling import SamplingParams


@dataclass
class Row:
    """One sequence: what it asks for and what it has said."""

    params: SamplingParams
    prompt: Sequence[int] = ()
    output: Sequence[int] = ()
    eos: Sequence[int] = ()
    choices: Sequence[int] = (0,)


def batch_of(rows: Sequence[Row], spare: int = 0) -> SamplingBatch:
    """Rows 0, 1, ... of a fresh batch."""
    batch = SamplingBatch(len(rows) + spare)
    for at, row in enumerate(rows):
        put(batch, at, row)
    return batch


def put(batch: SamplingBatch, at: int, row: Row) -> None:
    """The sequence in row ``at`` of the batch."""
    tokens = [*row.prompt, *row.output]
    batch.add(at, row.params, token_ids=tokens, num_prompt=len(row.prompt), eos_token_ids=row.eos)


def sample(logits: torch.Tensor, rows: Sequence[Row]) -> SamplerOutput:
    """One step of a fresh batch of these rows."""
    return Sampler(logits.shape[1]).sample(
        logits,
        batch_of(rows),
        rows=range(len(rows)),
        positions=[len(row.output) for row in rows],
        choices=[row.choices for row in rows],
    )


def tokens_of(logits: torch.Tensor, rows: Sequence[Row]) -> list[int]:
    return [int(token) for token in sample(logits, rows).token_ids]


def random_logits(rows: int, vocabulary: int, seed: int = 0) -> torch.Tensor:
    """Float32 logits of about a language model's spread."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocabulary, generator=generator) * 3
