"""State of a rank's sequences between steps: a row each, updated only by changes.

A row holds the tokens that its sequence came with, and its blocks. Sampled tokens stay on the
device (``StepStager``). Freed rows are reused, lowest first.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from tandem.engine.config import EngineConfig
from tandem.engine.sample import SamplingBatch
from tandem.engine.step import NewSequence, SchedulerOutput, SeqId
from tandem.engine.worker.pooling import Poolers
from tandem.protocol.card import KVKind, blocks_for

if TYPE_CHECKING:
    from torch import device

    from tandem.engine.models import CausalModel
    from tandem.engine.worker.step_rows import StepRows


class RowInputs(Protocol):
    """Inputs of one kind that some sequences have in addition to their tokens."""

    def add(self, row: int, new: NewSequence) -> None:
        """Keep the inputs of a new sequence in ``row``, if it has any."""
        ...

    def drop(self, row: int) -> None:
        """Forget the row's inputs, if there are any."""
        ...

    def of_step(self, rows: StepRows, model: CausalModel, on: device) -> object | None:
        """Return the input of an unpadded step (see ``StepContext.given``); None if its rows have
        none."""
        ...


class BlockTable:
    """Blocks by group and row, int32 in token order. A row that grows too long widens all."""

    def __init__(self, rows: int, columns: int, groups: int = 1, states: int = 0) -> None:
        """Allocate ``rows`` rows of ``columns`` blocks for each group; columns grow."""
        rows = max(rows, 1)
        self.blocks: NDArray[np.int32] = np.zeros((groups, rows, max(columns, 1)), dtype=np.int32)
        """[groups, rows, columns]; only the first ``counts`` of a row are valid."""
        self.counts: NDArray[np.int32] = np.zeros((groups, rows), dtype=np.int32)
        self.states: NDArray[np.int32] = np.zeros((states, rows), dtype=np.int32)
        """Block of each row's state."""
        self.version = 0

    def assign(self, row: int, tables: Sequence[Sequence[int]]) -> None:
        """Set the blocks of a row by group; those of states are last."""
        self.counts[:, row] = 0
        groups = len(self.blocks)
        self.append(row, tables[:groups])
        for number, state in enumerate(tables[groups:]):
            self.states[number, row] = state[0]

    def append(self, row: int, tables: Sequence[Sequence[int]]) -> None:
        self.version += 1
        for group, block_ids in enumerate(tables):
            held = int(self.counts[group, row])
            total = held + len(block_ids)
            if total > self.blocks.shape[2]:
                self._widen(max(total, 2 * self.blocks.shape[2]))
            np.maximum(block_ids, 0, out=self.blocks[group, row, held:total], casting="unsafe")
            self.counts[group, row] = total

    def _widen(self, columns: int) -> None:
        blocks = np.zeros((*self.blocks.shape[:2], columns), dtype=np.int32)
        blocks[:, :, : self.blocks.shape[2]] = self.blocks
        self.blocks = blocks


def batch_of(config: EngineConfig, capacity: int, longest: int = 256) -> InputBatch:
    """Return an empty batch for the layout of an engine."""
    kinds = [each.kind for each in config.layout.groups]
    states = kinds.count(KVKind.STATE)
    return InputBatch(config.cache.block_size, capacity, longest, len(kinds) - states, states)


@dataclass(slots=True)
class InputBatch:
    """Rows of the sequences that this rank holds."""

    block_size: int
    capacity: int
    """Maximum sequences: the scheduler's ``max_num_seqs``."""
    longest: int = 256
    """Initial tokens of each row; more require a slow copy of all rows. Unused pages take no
    memory."""
    groups: int = 1
    """Groups of the layout with a block for each span of tokens."""
    states: int = 0
    """Groups of the layout with a state."""
    row_of: dict[SeqId, int] = field(default_factory=dict)
    sequences: dict[SeqId, NewSequence] = field(default_factory=dict)
    """First message of the plan on each sequence."""
    tokens: NDArray[np.int32] = field(init=False)
    """[rows, longest]: tokens that each came with."""
    lengths: NDArray[np.int64] = field(init=False)
    """[rows]: their number; later tokens were sampled here."""
    prompts: NDArray[np.int64] = field(init=False)
    """[rows]: number of prompt tokens."""
    table: BlockTable = field(init=False)
    sampling: SamplingBatch = field(init=False)
    scoring: set[SeqId] = field(default_factory=set)
    """Sequences whose prompt's log-probabilities are requested."""
    poolers: Poolers = field(init=False)
    inputs: tuple[RowInputs, ...] = ()
    """Inputs of some sequences in addition to their tokens, by kind."""
    _free: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = np.zeros((self.capacity, self.longest), dtype=np.int32)
        self.lengths = np.zeros(self.capacity, dtype=np.int64)
        self.prompts = np.zeros(self.capacity, dtype=np.int64)
        columns = blocks_for(self.longest, self.block_size)
        self.table = BlockTable(self.capacity, columns, self.groups, self.states)
        self.sampling = SamplingBatch(self.capacity)
        self.poolers = Poolers(self.capacity)
        self._free = list(range(self.capacity))

    def apply(self, plan: SchedulerOutput) -> None:
        """Drop, add and extend rows by ``plan``, before its step."""
        for seq in plan.dropped:
            self.drop(seq)
        first = {row.seq: row.num_computed for row in plan.rows} if plan.new else {}
        for new in plan.new:
            self.add(new, first.get(new.seq, 0))
        for row in plan.rows:
            if row.new_block_ids:
                self.table.append(self.row_of[row.seq], row.new_block_ids)

    def add(self, new: NewSequence, first: int = 0) -> int:
        """Assign a row to a new sequence, and return it. Tokens before ``first`` are computed
        elsewhere and not kept."""
        assert new.seq not in self.row_of, f"sequence {new.seq} has a row already"
        assert self._free, f"more than {self.capacity} sequences: max_num_seqs bounds them"
        row = heapq.heappop(self._free)
        self.row_of[new.seq] = row
        self.sequences[new.seq] = new
        length = len(new.token_ids)
        self.reserve(length)
        # numpy reads an array faster than a list.
        self.tokens[row, first:length] = array("I", new.token_ids[first:])
        self.lengths[row] = length
        self.prompts[row] = new.num_prompt
        self.table.assign(row, new.block_ids)
        for each in self.inputs:
            each.add(row, new)
        if new.pooling is not None:
            self.poolers.add(row, new)
            return row  # it draws nothing
        if new.params.prompt_logprobs is not None:
            self.scoring.add(new.seq)
        self.sampling.add(
            row,
            new.params,
            token_ids=new.ruled_token_ids,
            num_prompt=new.num_ruled_prompt,
            eos_token_ids=new.eos_token_ids,
        )
        return row

    def drop(self, seq: SeqId) -> None:
        """Drop a sequence; ignore an unknown one, which had no step yet."""
        row = self.row_of.pop(seq, None)
        if row is None:
            return
        if self.sequences.pop(seq).pooling is not None:
            self.poolers.drop(row, seq)
        else:
            self.scoring.discard(seq)
            self.sampling.remove(row)
        for each in self.inputs:
            each.drop(row)
        heapq.heappush(self._free, row)

    def reserve(self, length: int) -> None:
        if length > self.tokens.shape[1]:
            wider = np.zeros(
                (self.tokens.shape[0], max(length, 2 * self.tokens.shape[1])), np.int32
            )
            wider[:, : self.tokens.shape[1]] = self.tokens
            self.tokens = wider
