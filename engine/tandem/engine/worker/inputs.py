"""Tensors of one forward pass, made of a plan's rows.

numpy makes them on the host; one copy brings them to the device. Padding is decodes without keys
and chunks without queries, whose writes go to a spare block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.engine.attention.base import LogitsRows, StepSequences
from tandem.engine.worker.input_batch import InputBatch
from tandem.engine.worker.staging import (
    Fields,
    Staging,
    StepBuffers,
    StepShape,
    TableSizes,
)
from tandem.engine.worker.step_rows import StepRows
from tandem.kernels.drafts import StepTokens
from tandem.kernels.rotary_kv import SlotMapping
from tandem.protocol.card import blocks_for

Fit = Callable[[StepShape], StepShape | None]
"""Function that returns the graph's shape to pad a step to; None: no padding."""
FEW_CHUNKS = 4
"""Maximum chunks that are written one by one, by slices, which is faster than by index."""
LONG_CHUNKS = 256
"""Tokens per chunk from which slices are faster for any number of chunks."""
Numbers = Sequence[int] | NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step's tokens on the device, concatenated in batch order, decodes first."""

    shape: StepShape
    padded: bool
    """Whether ``shape`` is a graph's, and all is at the addresses that the graph reads."""
    source: Tensor
    """int64 [tokens]: words of the staging buffer that hold the token ids."""
    positions: Tensor
    """int64 [tokens]."""
    slot_mapping: SlotMapping
    """Its blocks are [groups, tokens]."""
    sequences: StepSequences
    logits_indices: Tensor | None
    """int64: tokens whose hidden states a forward pass returns, in order; None is all. In a
    decoder's graph with chunks that is not ``whole``: the last of each row."""
    kept: Tensor | None
    """int64: those of them that the head takes, in order; None is all."""
    targets: Tensor
    """int64: rows of the batch whose last token is set to the step's samples."""
    tokens: StepTokens | None = None
    """Inputs that the history completes; None without one."""


class StepStager:
    """Maker of steps' inputs on one device."""

    def __init__(
        self,
        batch: InputBatch,
        device: torch.device,
        *,
        max_tokens: int,
        max_len: int,
        spare_block: int | None = None,
        whole: bool = False,
        history: bool = False,
    ) -> None:
        """``spare_block`` takes the writes of padding; without one nothing is padded. ``whole``:
        graphs return the states of all tokens, as an encoder's. ``history``: rows of one token and
        of drafts are completed on the device."""
        self.batch = batch
        self.whole = whole
        self.device = device
        self.columns = blocks_for(max_len, batch.block_size)
        """Columns of the table that graphs read."""
        self.staging = Staging(
            max_tokens=max_tokens,
            max_rows=batch.capacity,
            max_columns=self.columns,
            device=device,
            graphs=spare_block is not None,
            tables=TableSizes(batch.groups, batch.states, history),
        )
        self._spare = spare_block
        counted = max(max_len, max_tokens + 2 * batch.capacity) + batch.block_size
        self._counting = np.arange(counted + 1)
        self._offsets = self._counting % batch.block_size
        self._in_table: tuple[StepShape, int, int, bytes] | None = None
        """Key of the step whose blocks are in the table that graphs read."""
        self._columns_there = 0
        """Number of valid columns of each row."""

    def stage(
        self, rows: StepRows, logits_indices: Numbers | None, targets: Numbers, fit: Fit
    ) -> StepInputs:
        """Return the inputs of ``rows``, which have blocks for all their tokens.

        ``logits_indices`` are tokens of the unpadded step whose hidden states the head takes; None
        is all. For a padded decoder they are last tokens of rows, unless the shape is ``whole``.
        ``fit`` returns the shape to pad to.
        """
        padded = fit(rows.shape) if self._spare is not None else None
        if padded is not None and padded.width:
            rows = rows.as_chunks()
        own = rows.shape
        shape = own if padded is None else padded
        host = self.staging.open()
        buffers = self.staging.buffers(shape, keep=padded is not None)
        columns = self._new_columns(rows, padded)
        indices = logits_indices
        whole = padded is not None and self._is_whole(padded)
        ends = None if whole else self._rows_ending(rows, indices)
        if padded is not None and shape.chunks and not whole:
            assert indices is None or ends is not None, "a graph gives rows' last tokens alone"
            indices = ends
        elif indices is not None and ends is not None and indices is not rows.ends:
            indices = np.concatenate((np.asarray(indices), ends))
        count = 0 if indices is None else len(indices)
        tail = buffers.tail(count, len(targets), columns)
        here, there = tail.here(host), tail.there
        self._fill(buffers.here(host), rows, shape)
        here.targets[:] = targets
        if indices is not None:
            here.logits_indices[:] = indices
            if shape.decodes > own.decodes:
                behind = here.logits_indices >= own.decodes
                here.logits_indices[behind] += shape.decodes - own.decodes
        if columns:
            self._fill_table(here.tables, rows, shape)
        self.staging.send(host, tail)
        found = None if indices is None else there.logits_indices
        if padded is None:
            return self._inputs(buffers, there.tables, rows, found, ends, there.targets)
        if columns:
            tail.table.copy_(there.tables)
        return self._padded(buffers, found, there.targets)

    def _new_columns(self, rows: StepRows, padded: StepShape | None) -> int:
        """Return the columns of the block tables to send; 0 if a graph has read them before."""
        columns = blocks_for(int(rows.lens.max(initial=1)), self.batch.block_size)
        if padded is not None:
            # A row's place depends on the number of decodes before it, which a prompt's end
            # changes.
            rows_there = (rows.num_decodes, rows.index.tobytes())
            there = (padded, self.batch.table.version, *rows_there)
            if there == self._in_table and columns <= self._columns_there:
                return 0
            self._in_table, self._columns_there = there, columns
        return columns

    def _rows_ending(self, rows: StepRows, indices: Numbers | None) -> NDArray[np.int64] | None:
        """Return the rows whose last tokens are ``indices``, in their order. None for other tokens,
        or if every row is a decode."""
        if indices is None or not rows.shape.chunks:
            return None
        if indices is rows.ends:
            return self._counting[: len(rows.ends)]
        found = np.searchsorted(rows.ends, indices)
        return found if (rows.ends[found] == indices).all() else None

    def _fill_table(self, table: NDArray[Any], rows: StepRows, shape: StepShape) -> None:
        n = rows.num_decodes
        held = self.batch.table.blocks[:, rows.index, : table.shape[2]]
        width, chunks = held.shape[2], held.shape[1] - n
        table[:, :n, :width] = held[:, :n]
        table[:, shape.decodes : shape.decodes + chunks, :width] = held[:, n:]

    def _is_whole(self, shape: StepShape) -> bool:
        return self.whole or shape.whole

    def views(self, shape: StepShape, kept: Tensor | None, targets: Tensor) -> StepInputs:
        """Return a step at the fixed addresses of a graph's ``shape``."""
        return self._padded(self.staging.buffers(shape, keep=True), kept, targets)

    def _padded(self, buffers: StepBuffers, kept: Tensor | None, targets: Tensor) -> StepInputs:
        shape, fields, sequences = buffers.shape, buffers.fields, buffers.sequences
        ends = fields.ends if shape.chunks and not self._is_whole(shape) else None
        if sequences is None:
            most = self.columns * self.batch.block_size
            sequences = buffers.sequences = StepSequences(
                num_decodes=shape.decodes,
                cu_seqlens_q=fields.cu_seqlens_q,
                chunk_cu_seqlens_q=fields.chunk_cu_seqlens_q,
                seq_lens=fields.seq_lens,
                block_tables=self.staging.table[:, : shape.rows],
                states=self._states(fields, shape),
                max_query_len=shape.width or shape.chunk_tokens,
                max_decode_len=most,
                max_chunk_len=most,
                logits_rows=None if ends is None else LogitsRows(None, most),
            )
        return self._of(shape, fields, sequences, ends, kept, targets, padded=True)

    def stage_nothing(self, shape: StepShape) -> StepInputs:
        empty = StepRows.of((), {})
        return self.stage(empty, None, (), lambda _: shape)

    def draws(self, shape: StepShape) -> Tensor:
        """Return int64 [3, decodes] as a graph of decodes reads it: see ``Fields.draws``."""
        return self.staging.buffers(shape, keep=True).fields.draws.view(3, shape.decodes)

    def token_ids(self, inputs: StepInputs) -> Tensor:
        """Return int64 [tokens], read on the device, which has the sampled ones."""
        return self.staging.words.index_select(0, inputs.source)

    def _inputs(
        self,
        buffers: StepBuffers,
        tables: Tensor,
        rows: StepRows,
        indices: Tensor | None,
        ends: NDArray[np.int64] | None,
        targets: Tensor,
    ) -> StepInputs:
        shape, fields = buffers.shape, buffers.fields
        n, lens = shape.decodes, rows.lens
        logits_rows = None
        if ends is not None:
            assert indices is not None, "rows whose ends they are follow, if not all"
            theirs = None
            if indices.shape[0] == 2 * len(ends):
                indices, theirs = indices.view(2, len(ends)).unbind()
            logits_rows = LogitsRows(theirs, int(lens[ends].max(initial=0)))
        sequences = StepSequences(
            num_decodes=n,
            cu_seqlens_q=fields.cu_seqlens_q,
            chunk_cu_seqlens_q=fields.chunk_cu_seqlens_q,
            seq_lens=fields.seq_lens,
            block_tables=tables,
            states=self._states(fields, shape),
            max_query_len=int(rows.counts[n:].max(initial=0)),
            max_decode_len=int(lens[:n].max(initial=0)),
            max_chunk_len=int(lens[n:].max(initial=0)),
            logits_rows=logits_rows,
        )
        return self._of(shape, fields, sequences, indices, None, targets, padded=False)

    def _tokens(
        self, shape: StepShape, fields: Fields[Tensor], sequences: StepSequences
    ) -> StepTokens | None:
        if not self.staging.tables.history:
            return None
        return StepTokens(
            rows=fields.batch_rows,
            lens=fields.ends_by_host,
            chunk_starts=fields.chunk_cu_seqlens_q,
            token_ids=fields.token_ids,
            positions=fields.positions,
            blocks=fields.blocks.view(self.batch.groups, shape.tokens),
            offsets=fields.offsets,
            seq_lens=fields.seq_lens,
            block_tables=sequences.block_tables,
            draws=fields.draws.view(3, shape.decodes) if not shape.chunks else fields.draws,
            block_size=self.batch.block_size,
        )

    def _of(
        self,
        shape: StepShape,
        fields: Fields[Tensor],
        sequences: StepSequences,
        logits_indices: Tensor | None,
        kept: Tensor | None,
        targets: Tensor,
        *,
        padded: bool,
    ) -> StepInputs:
        return StepInputs(
            shape=shape,
            padded=padded,
            source=fields.source,
            positions=fields.positions,
            slot_mapping=SlotMapping(
                fields.blocks.view(self.batch.groups, shape.tokens), fields.offsets
            ),
            sequences=sequences,
            logits_indices=logits_indices,
            kept=kept,
            targets=targets,
            tokens=self._tokens(shape, fields, sequences),
        )

    def _states(self, fields: Fields[Tensor], shape: StepShape) -> Tensor | None:
        states = self.batch.states
        return fields.states.view(states, shape.rows) if states else None

    def _fill_states(self, fields: Fields[NDArray[Any]], rows: StepRows, shape: StepShape) -> None:
        n, found = rows.num_decodes, fields.states.reshape(-1, shape.rows)
        held = self.batch.table.states[:, rows.index]
        found[:] = 0 if self._spare is None else self._spare
        found[:, :n] = held[:, :n]
        found[:, shape.decodes : shape.decodes + held.shape[1] - n] = held[:, n:]

    def _fill(self, fields: Fields[NDArray[Any]], rows: StepRows, shape: StepShape) -> None:
        batch, n, own = self.batch, rows.num_decodes, rows.shape
        lens = rows.lens
        if batch.states:
            self._fill_states(fields, rows, shape)
        room = batch.table.counts[:, rows.index].min(0) * batch.block_size
        assert (room >= lens).all(), f"rows of {lens} tokens have blocks for {room}"
        origin = self.staging.front // 8
        np.add(self._counting[: shape.tokens], origin, out=fields.source)
        if n:
            self._fill_tokens(fields, slice(0, n), rows.index[:n], rows.first[:n])
            sampled_here = rows.first[:n] >= batch.lengths[rows.index[:n]]
            np.copyto(fields.source[:n], rows.index[:n], where=sampled_here)
        end = shape.decodes + own.chunk_tokens
        if own.chunks > FEW_CHUNKS and own.chunk_tokens < LONG_CHUNKS * own.chunks:
            owners, positions = rows.chunk_tokens()
            self._fill_tokens(fields, slice(shape.decodes, end), owners, positions)
        elif own.chunks:
            self._fill_chunks(fields, shape.decodes, rows)
        if rows.drafted:
            starts = shape.decodes + np.cumsum(rows.counts[n:]) - rows.counts[n:]
            sampled_here = rows.first[n:] >= batch.lengths[rows.index[n:]]
            fields.source[starts[sampled_here]] = rows.index[n:][sampled_here]
        for part in (slice(n, shape.decodes), slice(end, shape.tokens)):
            self._pad_tokens(fields, part)
        fields.cu_seqlens_q[:] = self._counting[: shape.rows + 1]
        fields.chunk_cu_seqlens_q[0] = 0
        if shape.chunks:
            fields.chunk_cu_seqlens_q[1 : own.chunks + 1] = np.cumsum(rows.counts[n:])
            fields.chunk_cu_seqlens_q[own.chunks + 1 :] = own.chunk_tokens
            fields.ends[: shape.decodes] = self._counting[: shape.decodes]
            # Any token for an empty chunk, whose end is not used.
            np.maximum(
                fields.chunk_cu_seqlens_q[1:] + (shape.decodes - 1),
                0,
                out=fields.ends[shape.decodes :],
            )
        fields.seq_lens[n:] = 0
        fields.seq_lens[:n] = lens[:n]
        if own.chunks:
            fields.seq_lens[shape.decodes : shape.decodes + own.chunks] = lens[n:]
        if self.staging.tables.history:
            self._fill_rows(fields, rows, shape)
        if rows.choices is not None and not shape.chunks:
            self._fill_draws(fields.draws.reshape(3, shape.decodes), rows, rows.choices)

    def _fill_rows(self, fields: Fields[NDArray[Any]], rows: StepRows, shape: StepShape) -> None:
        n, batch = rows.num_decodes, self.batch
        ends = np.where(rows.first >= batch.lengths[rows.index], -1, rows.lens)
        for field, numbers, padding in (
            (fields.batch_rows, rows.index, batch.capacity),
            (fields.ends_by_host, ends, 0),
        ):
            field[:] = padding
            field[:n] = numbers[:n]
            field[shape.decodes : shape.decodes + len(numbers) - n] = numbers[n:]

    def _fill_draws(
        self, draws: NDArray[np.int64], rows: StepRows, choices: NDArray[np.int64]
    ) -> None:
        n = len(rows.index)
        draws[0, :n], draws[1, :n] = rows.index, choices
        np.subtract(rows.lens, self.batch.prompts[rows.index], out=draws[2, :n])
        draws[0, n:], draws[1:, n:] = self.batch.capacity, 0

    def _fill_tokens(
        self,
        fields: Fields[NDArray[Any]],
        part: slice,
        owners: NDArray[np.int64],
        positions: NDArray[np.int64],
    ) -> None:
        batch = self.batch
        within = np.minimum(positions, batch.tokens.shape[1] - 1)
        block, offset = np.divmod(positions, batch.block_size)
        fields.token_ids[part] = batch.tokens[owners, within]
        fields.positions[part] = positions
        self._blocks(fields)[:, part] = batch.table.blocks[:, owners, block]
        fields.offsets[part] = offset

    def _fill_chunks(self, fields: Fields[NDArray[Any]], at: int, rows: StepRows) -> None:
        batch, size, n = self.batch, self.batch.block_size, rows.num_decodes
        blocks = self._blocks(fields)
        for row, first, count in zip(
            rows.index[n:].tolist(), rows.first[n:].tolist(), rows.counts[n:].tolist(), strict=True
        ):
            part, last = slice(at, at + count), first + count
            block, offset = divmod(first, size)
            held = batch.table.blocks[:, row, block : blocks_for(last, size)]
            fields.token_ids[part] = batch.tokens[row, first:last]
            fields.positions[part] = self._counting[first:last]
            blocks[:, part] = held.repeat(size, 1)[:, offset : offset + count]
            fields.offsets[part] = self._offsets[offset : offset + count]
            at += count

    def _blocks(self, fields: Fields[NDArray[Any]]) -> NDArray[Any]:
        return fields.blocks.reshape(self.batch.groups, -1)

    def _pad_tokens(self, fields: Fields[NDArray[Any]], part: slice) -> None:
        if part.start < part.stop:
            for each in (fields.token_ids, fields.positions):
                each[part] = 0
            self._blocks(fields)[:, part] = self._spare
            fields.offsets[part] = self._offsets[part]


def unpadded(_: StepShape) -> None:
    """Return None: a ``Fit`` that pads nothing."""
