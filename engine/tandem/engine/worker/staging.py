"""Getting a step's numbers onto the device: filled on the host, copied at once, never waited for.

One device buffer at fixed addresses, so that CUDA graphs can read it, and a few pinned host buffers
used in turn, so that the host may fill the next step's while the last one's is on its way. On a CPU
the two are the same memory. At the buffer's front, before what is copied, lies the last token that
each row drew: a step takes its decodes' tokens from there, by index, whether the host has seen them
or not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.engine.attention.base import StepSequences
from tandem.engine.worker.moments import Moment, moment

A = TypeVar("A")

RING = 3
"""Host buffers: two steps are in flight, a third is being filled."""
WORD = 8
"""Bytes that every field is aligned to."""
KEPT_TAILS = 512
"""Sizes of what follows a shape's fields whose views are kept."""


class StepShape(NamedTuple):
    """Sizes of a step's tensors: its own, or those of the graph that it is padded to."""

    decodes: int
    """Rows of one token, first."""
    chunk_tokens: int
    """Tokens of all other rows."""
    chunks: int
    """Rows of more than one token."""

    @property
    def tokens(self) -> int:
        """Tokens in all."""
        return self.decodes + self.chunk_tokens

    @property
    def rows(self) -> int:
        """Rows in all."""
        return self.decodes + self.chunks


class Fields(NamedTuple, Generic[A]):
    """Where a step's numbers are, in numpy on the host or in tensors on the device."""

    token_ids: A
    """int64 [tokens]."""
    source: A
    """int64 [tokens]: which word of the device buffer holds the token; usually its ``token_ids``,
    for a decode whose token was drawn here the row's place at the front."""
    positions: A
    """int64 [tokens]."""
    blocks: A
    """int64 [tokens]."""
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
    """int64 [3 * decodes]: row of the batch (of padding the spare one), choice and output position
    of each draw; empty in a step with chunks."""


class Tail(NamedTuple, Generic[A]):
    """What follows the fields, of a size that changes from step to step."""

    logits_indices: A
    """int64 [num_logits]: tokens whose hidden states are for the head; int64 [2 * num_logits] if
    they are the last of some rows, which follow; rows alone where all ends are computed
    (``Fields.ends``)."""
    targets: A
    """int64 [drawing rows]: rows of the batch whose last token the draws become."""
    tables: A
    """int32 [rows, columns]: block tables; no columns where the device has them already."""


Cut = Callable[[int, int, bool], A]
"""(first byte, count, 64 bits wide) to a view of that many integers."""


def _padded(count: int, wide: bool) -> int:
    return -(-count * (8 if wide else 4) // WORD) * WORD


def _cut_all(cut: Cut[A], first: int, sizes: tuple[tuple[int, bool], ...]) -> tuple[list[A], int]:
    parts = []
    for count, wide in sizes:
        parts.append(cut(first, count, wide))
        first += _padded(count, wide)
    return parts, first


def _field_sizes(shape: StepShape) -> tuple[tuple[int, bool], ...]:
    wide = ((shape.tokens, True),) * 5
    starts = ((shape.rows + 1, False), (shape.chunks + 1, False))
    ends, draws = (shape.rows, 0) if shape.chunks else (0, 3 * shape.decodes)
    return (*wide, *starts, (shape.rows, False), (ends, True), (draws, True))


class Staging:
    """The memory. ``open`` one step's host buffer, fill what its shape's ``buffers`` show of it,
    ``send`` it."""

    def __init__(
        self,
        *,
        max_tokens: int,
        max_rows: int,
        max_columns: int,
        device: torch.device,
        graphs: bool,
    ) -> None:
        """For steps of at most so many tokens and rows, whose tables have so many columns.
        ``graphs``: some steps are padded to the shapes of CUDA graphs."""
        shape = StepShape(max_rows, max_tokens, max_rows)
        front = (max_rows + 1) * WORD
        num_logits, targets = max_tokens + 2 * max_rows, 2 * max_rows
        size = front + sum(_padded(*each) for each in _field_sizes(shape))
        size += (num_logits + targets + 3 * max_rows) * 8 + _padded(
            2 * max_rows * max_columns, False
        )
        self.device = device
        self.front = front
        self.memory = torch.zeros(size, dtype=torch.uint8, device=device)
        """The device buffer."""
        whole = self.memory[: size // WORD * WORD]
        self.words: Tensor = whole.view(torch.int64)
        """The whole device buffer as int64."""
        self._halves = whole.view(torch.int32)
        self.last_tokens: Tensor = self.words[: max_rows + 1]
        """int64 [rows of the batch, and a spare one]: the token that each drew last."""
        rows = 2 * max_rows if graphs else 0
        self.table: Tensor = torch.zeros(rows, max_columns, dtype=torch.int32, device=device)
        """int32 [rows, columns]: the block tables that graphs read."""
        self._hosts = [HostBuffer(turn, size, self.memory) for turn in range(RING)]
        self._turn = 0
        self._kept: dict[StepShape, StepBuffers] = {}

    def open(self) -> HostBuffer:
        """The next host buffer; its last copy is through."""
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
        """Where the numbers of a step of ``shape`` are; ``keep`` remembers it, for graphs' shapes.
        They repeat where others rarely do, and their views take tens of microseconds to make."""
        known = self._kept.get(shape)
        if known is None:
            known = StepBuffers(self, shape, kept=keep)
            if keep:
                self._kept[shape] = known
        return known

    def cut(self, first: int, count: int, wide: bool) -> Tensor:
        """See Cut; of the device buffer."""
        words, at = (self.words, first // 8) if wide else (self._halves, first // 4)
        return words[at : at + count]


class HostBuffer:
    """One host side of the device buffer: pinned memory, or the same on a CPU."""

    def __init__(self, turn: int, size: int, device_memory: Tensor) -> None:
        same = device_memory.device.type != "cuda"
        self.turn = turn
        """The buffer's place in the ring."""
        self.memory = device_memory if same else torch.zeros(size, dtype=torch.uint8).pin_memory()
        self._bytes: NDArray[np.uint8] = self.memory.numpy()
        self.sent: Moment | None = None

    def free(self) -> None:
        """Wait for the last copy out of here; it was two steps ago."""
        if self.sent is not None:
            self.sent.wait()
            self.sent = None

    def cut(self, first: int, count: int, wide: bool) -> NDArray[Any]:
        """See Cut."""
        dtype = np.dtype(np.int64 if wide else np.int32)
        return self._bytes[first : first + count * dtype.itemsize].view(dtype)


class StepBuffers:
    """Where steps of one shape have their numbers: views of the device buffer, at addresses that a
    graph of that shape reads, and of each host buffer, made when it is first its turn."""

    def __init__(self, staging: Staging, shape: StepShape, *, kept: bool) -> None:
        self.shape = shape
        self.staging = staging
        parts, self.end = _cut_all(staging.cut, staging.front, _field_sizes(shape))
        self.fields: Fields[Tensor] = Fields(*parts)
        """On the device."""
        self.sequences: StepSequences | None = None
        """What attention reads of a graph's step; the same at every replay."""
        self._here: list[Fields[NDArray[Any]] | None] = [None] * RING
        self._kept = kept
        self._tails: dict[tuple[int, int, int], StepTail] = {}

    def here(self, host: HostBuffer) -> Fields[NDArray[Any]]:
        """The fields to fill."""
        known = self._here[host.turn]
        if known is None:
            parts, _ = _cut_all(host.cut, self.staging.front, _field_sizes(self.shape))
            known = self._here[host.turn] = Fields(*parts)
        return known

    def tail(self, num_logits: int, targets: int, columns: int) -> StepTail:
        """What follows the fields, for so many of each."""
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
    """What follows a shape's fields, of one size: views as ``StepBuffers`` has them."""

    def __init__(self, buffers: StepBuffers, num_logits: int, targets: int, columns: int) -> None:
        self._staging, self._first = buffers.staging, buffers.end
        rows = buffers.shape.rows
        self._sizes = ((num_logits, True), (targets, True), (rows * columns, False))
        self._tables = (rows, columns)
        parts, self._end = _cut_all(self._staging.cut, self._first, self._sizes)
        self.there: Tail[Tensor] = Tail(parts[0], parts[1], parts[2].view(self._tables))
        """On the device."""
        self.table: Tensor = self._staging.table[:rows, :columns]
        """Where graphs read these tables; none without graphs."""
        self._here: list[Tail[NDArray[Any]] | None] = [None] * RING
        self._copies: list[tuple[Tensor, Tensor] | None] = [None] * RING

    def here(self, host: HostBuffer) -> Tail[NDArray[Any]]:
        """What is to be filled."""
        known = self._here[host.turn]
        if known is None:
            parts, _ = _cut_all(host.cut, self._first, self._sizes)
            tables = parts[2].reshape(self._tables)
            known = self._here[host.turn] = Tail(parts[0], parts[1], tables)
        return known

    def copy(self, host: HostBuffer) -> tuple[Tensor, Tensor]:
        """All that a step sends, there and here."""
        known = self._copies[host.turn]
        if known is None:
            part = slice(self._staging.front, self._end)
            known = self._copies[host.turn] = self._staging.memory[part], host.memory[part]
        return known
