"""Transfer of a step's numbers to the device: filled on the host, copied at once, never waited for.

The device buffer is at fixed addresses for CUDA graphs; pinned host buffers are used in turn. On a
CPU both are the same memory. Its front holds the last token that each row sampled, from which
decodes read by index.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.engine.attention.base import StepSequences
from tandem.engine.worker.device_events import DeviceEvent, moment

A = TypeVar("A")

RING = 3
"""Host buffers: two steps are in flight, a third is being filled."""
WORD = 8
"""Alignment of every field in bytes."""
KEPT_TAILS = 512
"""Sizes of a shape's tail whose views are kept."""


class StepShape(NamedTuple):
    """Sizes of a step's tensors: its own, or those of the graph that it is padded to."""

    decodes: int
    """Rows of one token, first."""
    chunk_tokens: int
    """Tokens of all other rows."""
    chunks: int
    """Rows of more than one token."""
    width: int = 0
    """Maximum tokens of such a row; 0: all of them. A graph with a width has no decodes: each row,
    of one token or several, is one of its chunks."""
    whole: bool = False
    """Whether a decoder's graph returns the states of all tokens, not only of each row's last."""

    @property
    def tokens(self) -> int:
        return self.decodes + self.chunk_tokens

    @property
    def rows(self) -> int:
        return self.decodes + self.chunks


class Fields(NamedTuple, Generic[A]):
    """Arrays of a step's numbers, in numpy on the host or in tensors on the device."""

    token_ids: A
    """int64 [tokens]."""
    source: A
    """int64 [tokens]: index of the device buffer's word with the token, in ``token_ids`` or, if
    sampled here, at the front."""
    positions: A
    """int64 [tokens]."""
    blocks: A
    """int64 [groups * tokens]: the block of each token in each group."""
    offsets: A
    """int64 [tokens]."""
    cu_seqlens_q: A
    """int32 [rows + 1]."""
    chunk_cu_seqlens_q: A
    """int32 [chunks + 1]."""
    seq_lens: A
    """int32 [rows]."""
    ends: A
    """int64 [rows]: the last token of each; empty in a step without chunks."""
    draws: A
    """int64 [3 * decodes]: row of the batch (the spare one for padding), choice and output position
    of each sample; empty in a step with chunks."""
    states: A
    """int32 [state groups * rows]: the block of each row's state."""
    batch_rows: A
    """int64 [rows]: row of the batch (the spare one for padding); empty without a history."""
    ends_by_host: A
    """int64 [rows]: tokens up to each row's end; -1 if the history knows it, empty without one."""


class Tail(NamedTuple, Generic[A]):
    """Arrays after the fields, whose size changes from step to step."""

    logits_indices: A
    """int64 [num_logits]: tokens for the head. int64 [2 * num_logits] if they are the last of some
    rows, which follow; only rows if all ends are computed (``Fields.ends``)."""
    targets: A
    """int64 [drawing rows]: rows of the batch whose last token is set to the samples."""
    tables: A
    """int32 [groups, rows, columns]: block tables; no columns if the device has them already."""


Cut = Callable[[int, int, bool], A]
"""Function of (first byte, count, 64 bits wide) that returns a view of that many integers."""


def _padded(count: int, wide: bool) -> int:
    return -(-count * (8 if wide else 4) // WORD) * WORD


def _cut_all(cut: Cut[A], first: int, sizes: tuple[tuple[int, bool], ...]) -> tuple[list[A], int]:
    parts = []
    for count, wide in sizes:
        parts.append(cut(first, count, wide))
        first += _padded(count, wide)
    return parts, first


class TableSizes(NamedTuple):
    """Numbers of block tables and states of each row."""

    groups: int = 1
    states: int = 0
    history: bool = False
    """Whether tokens of the rows are kept on the device."""


ONE_TABLE = TableSizes()


def _field_sizes(shape: StepShape, tables: TableSizes) -> tuple[tuple[int, bool], ...]:
    one = (shape.tokens, True)
    wide = (one, one, one, (tables.groups * shape.tokens, True), one)
    starts = ((shape.rows + 1, False), (shape.chunks + 1, False))
    ends, draws = (shape.rows, 0) if shape.chunks else (0, 3 * shape.decodes)
    kept = (shape.rows if tables.history else 0, True)
    last = ((ends, True), (draws, True), (tables.states * shape.rows, False), kept, kept)
    return (*wide, *starts, (shape.rows, False), *last)


class Staging:
    """Memory of the buffers. ``open`` a host buffer, fill its views in the shape's ``buffers``,
    ``send`` it."""

    def __init__(
        self,
        *,
        max_tokens: int,
        max_rows: int,
        max_columns: int,
        device: torch.device,
        graphs: bool,
        tables: TableSizes = ONE_TABLE,
    ) -> None:
        """Allocate for steps of at most these sizes. ``graphs``: some steps are padded to the
        shapes of CUDA graphs."""
        shape = StepShape(max_rows, max_tokens, max_rows)
        front = (max_rows + 1) * WORD
        num_logits, targets = max_tokens + 2 * max_rows, 2 * max_rows
        self.tables = tables
        size = front + sum(_padded(*each) for each in _field_sizes(shape, tables))
        size += (num_logits + targets + 3 * max_rows) * 8 + _padded(
            tables.groups * 2 * max_rows * max_columns, False
        )
        self.device = device
        self.front = front
        self.memory = torch.zeros(size, dtype=torch.uint8, device=device)
        whole = self.memory[: size // WORD * WORD]
        self.words: Tensor = whole.view(torch.int64)
        """Whole device buffer as int64."""
        self._halves = whole.view(torch.int32)
        self.last_tokens: Tensor = self.words[: max_rows + 1]
        """int64 [rows of the batch, and a spare one]: last sampled tokens."""
        rows = 2 * max_rows if graphs else 0
        of_all = (tables.groups, rows, max_columns)
        self.table: Tensor = torch.zeros(of_all, dtype=torch.int32, device=device)
        """int32 [groups, rows, columns]: block tables that graphs read."""
        self._hosts = [HostBuffer(turn, size, self.memory) for turn in range(RING)]
        self._turn = 0
        self._kept: dict[StepShape, StepBuffers] = {}

    def open(self) -> HostBuffer:
        """Return the next host buffer after its last copy has ended."""
        self._turn = (self._turn + 1) % RING
        host = self._hosts[self._turn]
        host.free()
        return host

    def send(self, host: HostBuffer, tail: StepTail) -> None:
        """Start the copy of a step's numbers, up to the end of ``tail``."""
        if self.device.type == "cuda":
            there, here = tail.copy(host)
            there.copy_(here, non_blocking=True)
            host.sent = moment(self.device)

    def buffers(self, shape: StepShape, *, keep: bool) -> StepBuffers:
        """Return the views of a step of ``shape``; ``keep`` stores them for later steps."""
        known = self._kept.get(shape)
        if known is None:
            known = StepBuffers(self, shape, kept=keep)
            if keep:
                self._kept[shape] = known
        return known

    def cut(self, first: int, count: int, wide: bool) -> Tensor:
        words, at = (self.words, first // 8) if wide else (self._halves, first // 4)
        return words[at : at + count]


class HostBuffer:
    """Host side of the device buffer: pinned memory, or the same on a CPU."""

    def __init__(self, turn: int, size: int, device_memory: Tensor) -> None:
        same = device_memory.device.type != "cuda"
        self.turn = turn
        self.memory = device_memory if same else torch.zeros(size, dtype=torch.uint8).pin_memory()
        self._bytes: NDArray[np.uint8] = self.memory.numpy()
        self.sent: DeviceEvent | None = None

    def free(self) -> None:
        """Wait for the last copy from this buffer, which was two steps ago."""
        if self.sent is not None:
            self.sent.wait()
            self.sent = None

    def cut(self, first: int, count: int, wide: bool) -> NDArray[Any]:
        dtype = np.dtype(np.int64 if wide else np.int32)
        return self._bytes[first : first + count * dtype.itemsize].view(dtype)


class StepBuffers:
    """Views of steps of one shape: of the device buffer, and of each host buffer, made at its first
    turn."""

    def __init__(self, staging: Staging, shape: StepShape, *, kept: bool) -> None:
        self.shape = shape
        self.staging = staging
        sizes = _field_sizes(shape, staging.tables)
        parts, self.end = _cut_all(staging.cut, staging.front, sizes)
        self.fields: Fields[Tensor] = Fields(*parts)
        self.sequences: StepSequences | None = None
        """Attention's inputs of a graph's step; the same at every replay."""
        self._here: list[Fields[NDArray[Any]] | None] = [None] * RING
        self._kept = kept
        self._tails: dict[tuple[int, int, int], StepTail] = {}

    def here(self, host: HostBuffer) -> Fields[NDArray[Any]]:
        known = self._here[host.turn]
        if known is None:
            sizes = _field_sizes(self.shape, self.staging.tables)
            parts, _ = _cut_all(host.cut, self.staging.front, sizes)
            known = self._here[host.turn] = Fields(*parts)
        return known

    def tail(self, num_logits: int, targets: int, columns: int) -> StepTail:
        """Return the tail after the fields, for these sizes."""
        key = (num_logits, targets, columns)
        known = self._tails.get(key)
        if known is None:
            known = StepTail(self, num_logits, targets, columns)
            if self._kept:
                if len(self._tails) == KEPT_TAILS:
                    self._tails.clear()
                self._tails[key] = known
        return known


class StepTail:
    """Tail of one size: views as in ``StepBuffers``."""

    def __init__(self, buffers: StepBuffers, num_logits: int, targets: int, columns: int) -> None:
        self._staging, self._first = buffers.staging, buffers.end
        rows = buffers.shape.rows
        groups = self._staging.tables.groups
        self._tables = (groups, rows, columns)
        self._sizes = ((num_logits, True), (targets, True), (groups * rows * columns, False))
        parts, self._end = _cut_all(self._staging.cut, self._first, self._sizes)
        self.there: Tail[Tensor] = Tail(parts[0], parts[1], parts[2].view(self._tables))
        self.table: Tensor = self._staging.table[:, :rows, :columns]
        """Tables that graphs read; empty without graphs."""
        self._here: list[Tail[NDArray[Any]] | None] = [None] * RING
        self._copies: list[tuple[Tensor, Tensor] | None] = [None] * RING

    def here(self, host: HostBuffer) -> Tail[NDArray[Any]]:
        known = self._here[host.turn]
        if known is None:
            parts, _ = _cut_all(host.cut, self._first, self._sizes)
            tables = parts[2].reshape(self._tables)
            known = self._here[host.turn] = Tail(parts[0], parts[1], tables)
        return known

    def copy(self, host: HostBuffer) -> tuple[Tensor, Tensor]:
        """Return all bytes that a step sends: on the device and on the host."""
        known = self._copies[host.turn]
        if known is None:
            part = slice(self._staging.front, self._end)
            known = self._copies[host.turn] = self._staging.memory[part], host.memory[part]
        return known
