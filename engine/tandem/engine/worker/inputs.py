"""A plan's rows, flattened: the tensors that one forward pass takes.

numpy on the host for all of it (a row is a few numbers), then one tensor each. A step of decodes
alone, which is most steps, takes a shorter way.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.engine.attention.base import StepSequences
from tandem.engine.scheduler.output import StepRow
from tandem.engine.worker.input_batch import InputBatch
from tandem.kernels.rotary_kv import Slots
from tandem.protocol.layout import blocks_for


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step's tokens, laid end to end in batch order."""

    token_ids: Tensor
    """int64 [tokens]."""
    positions: Tensor
    """int64 [tokens]."""
    slots: Slots
    sequences: StepSequences
    query_start: list[int]
    """[rows + 1]: first token of each row, and the end."""


def make_inputs(rows: tuple[StepRow, ...], batch: InputBatch, device: torch.device) -> StepInputs:
    """Inputs of ``rows``, which ``batch`` already knows."""
    index = np.array([batch.row_of[row.seq] for row in rows], dtype=np.int64)
    first = np.array([row.num_computed for row in rows], dtype=np.int64)
    counts = np.array([row.num_tokens for row in rows], dtype=np.int64)
    lens = first + counts
    starts = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum(counts, out=starts[1:])
    room = batch.table.counts[index] * batch.block_size
    assert (room >= lens).all(), f"rows of {lens} tokens have blocks for {room}"
    owners, positions = _flatten(index, first, counts, starts)
    held = batch.table.blocks
    columns = blocks_for(int(lens.max()), batch.block_size)
    block, offset = np.divmod(positions, batch.block_size)

    def put(values: NDArray[np.generic], dtype: type[np.generic]) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(values, dtype=dtype))
        return tensor.to(device, non_blocking=True)

    return StepInputs(
        token_ids=put(batch.tokens[owners, positions], np.int64),
        positions=put(positions, np.int64),
        slots=Slots(put(held[owners, block], np.int64), put(offset, np.int64)),
        sequences=StepSequences(
            query_start=put(starts, np.int32),
            seq_lens=put(lens, np.int32),
            block_tables=put(held[index, :columns], np.int32),
            query_lens=counts.tolist(),
            host_seq_lens=lens.tolist(),
        ),
        query_start=starts.tolist(),
    )


def _flatten(
    index: NDArray[np.int64],
    first: NDArray[np.int64],
    counts: NDArray[np.int64],
    starts: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Row of the batch and position of every token of the step."""
    if starts[-1] == len(index):
        return index, first
    within = np.arange(starts[-1], dtype=np.int64) - np.repeat(starts[:-1], counts)
    return np.repeat(index, counts), np.repeat(first, counts) + within
