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

from tandem.engine.worker.moments import Moment, moment

A = TypeVar("A")
K = TypeVar("K")
V = TypeVar("V")

RING = 3
"""Host buffers: two steps are in flight, a third is being filled."""
WORD = 8
"""Bytes that every field is aligned to."""
KNOWN = 4096
"""Views of one kind that are kept, of graphs' shapes: making one takes 10 us, and such steps repeat
where others rarely do."""


class StepShape(NamedTuple):
    """Sizes of a step's tensors: its own, or those of the graph that it is padded to."""

    decodes: int
    """Rows of one token, first."""
    chunk_tokens: int
    """Tokens of all other rows."""
    chunks: int
    """Those rows."""

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

    wanted: A
    """int64 [wanted]: tokens whose hidden states are wanted; int64 [2 * wanted] if they are the
    last of some rows, which follow; rows alone where all ends are computed (``Fields.ends``)."""
    targets: A
    """int64 [drawing rows]: rows of the batch whose last token the draws become."""
    tables: A
    """int32 [rows * columns]."""


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
    """The buffers. ``open`` one step's host side, fill it, ``send`` it."""

    def __init__(
        self, *, max_tokens: int, max_rows: int, max_columns: int, device: torch.device
    ) -> None:
        """For steps of at most so many tokens and rows, whose tables have so many columns."""
        shape = StepShape(max_rows, max_tokens, max_rows)
        front = (max_rows + 1) * WORD
        wanted, targets = max_tokens + 2 * max_rows, 2 * max_rows
        size = front + sum(_padded(*each) for each in _field_sizes(shape))
        size += (wanted + targets + 3 * max_rows) * 8 + _padded(2 * max_rows * max_columns, False)
        self.device = device
        self.front = front
        self._memory = torch.zeros(size, dtype=torch.uint8, device=device)
        whole = self._memory[: size // WORD * WORD]
        self.words: Tensor = whole.view(torch.int64)
        """The whole device buffer as int64."""
        self._halves = whole.view(torch.int32)
        self.last_tokens: Tensor = self.words[: max_rows + 1]
        """int64 [rows of the batch, and a spare one]: the token that each drew last."""
        self._hosts = [_Host(size, self._memory) for _ in range(RING)]
        self._turn = 0
        self._known: dict[StepShape, Fields[Tensor]] = {}
        self._tails: dict[tuple[StepShape, int, int, int], Tail[Tensor]] = {}

    def open(self) -> _Host:
        """The next host side; its last copy is through."""
        self._turn = (self._turn + 1) % RING
        host = self._hosts[self._turn]
        host.free()
        return host

    def send(self, host: _Host) -> None:
        """Start the copy of all that was cut from ``host``."""
        if self.device.type == "cuda":
            there, here = host.sending(self._memory, self.front)
            there.copy_(here, non_blocking=True)
            host.sent = moment(self.device)

    def fields(self, shape: StepShape, *, keep: bool) -> Fields[Tensor]:
        """The device's views of a step of ``shape``; ``keep`` remembers them."""
        known = self._known.get(shape)
        if known is None:
            parts, _ = _cut_all(self._tensor, self.front, _field_sizes(shape))
            known = Fields(*parts)
            if keep:
                self._known[shape] = known
        return known

    def tail(self, shape: StepShape, wanted: int, targets: int, entries: int) -> Tail[Tensor]:
        """The device's views of what follows; remembered where the fields' are."""
        key = (shape, wanted, targets, entries)
        known = self._tails.get(key)
        if known is None:
            first = end_of(shape, self.front)
            parts, _ = _cut_all(self._tensor, first, _tail_sizes(wanted, targets, entries))
            known = Tail(*parts)
            if shape in self._known:
                _keep(self._tails, key, known)
        return known

    def _tensor(self, first: int, count: int, wide: bool) -> Tensor:
        words, at = (self.words, first // 8) if wide else (self._halves, first // 4)
        return words[at : at + count]


class _Host:
    """One host side, cut into numpy views."""

    def __init__(self, size: int, device_memory: Tensor) -> None:
        same = device_memory.device.type != "cuda"
        self.memory = device_memory if same else torch.zeros(size, dtype=torch.uint8).pin_memory()
        self._bytes: NDArray[np.uint8] = self.memory.numpy()
        self.used = 0
        self._keeps = False
        """Whether this step's shape is one whose views are remembered."""
        self.sent: Moment | None = None
        self._known: dict[StepShape, tuple[Fields[NDArray[Any]], int]] = {}
        self._tails: dict[tuple[int, int, int, int], tuple[Tail[NDArray[Any]], int]] = {}
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}

    def free(self) -> None:
        """Wait for the last copy out of here; it was two steps ago."""
        if self.sent is not None:
            self.sent.wait()
            self.sent = None

    def fields(self, shape: StepShape, front: int, *, keep: bool) -> Fields[NDArray[Any]]:
        """Views to fill; ``keep`` remembers them."""
        known = self._known.get(shape)
        if known is None:
            parts, end = _cut_all(self._array, front, _field_sizes(shape))
            known = Fields(*parts), end
            if keep:
                self._known[shape] = known
        fields, self.used = known
        self._keeps = keep
        return fields

    def tail(self, wanted: int, targets: int, entries: int) -> Tail[NDArray[Any]]:
        """Views to fill, after ``fields``; remembered where those are."""
        key = (self.used, wanted, targets, entries)
        known = self._tails.get(key)
        if known is None:
            sizes = _tail_sizes(wanted, targets, entries)
            parts, end = _cut_all(self._array, self.used, sizes)
            known = Tail(*parts), end
            if self._keeps:
                _keep(self._tails, key, known)
        tail, self.used = known
        return tail

    def sending(self, device_memory: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """What is used from ``first`` on, there and here."""
        known = self._copies.get(self.used)
        if known is None:
            part = slice(first, self.used)
            known = device_memory[part], self.memory[part]
            if self._keeps:
                _keep(self._copies, self.used, known)
        return known

    def _array(self, first: int, count: int, wide: bool) -> NDArray[Any]:
        dtype = np.dtype(np.int64 if wide else np.int32)
        return self._bytes[first : first + count * dtype.itemsize].view(dtype)


def _tail_sizes(wanted: int, targets: int, entries: int) -> tuple[tuple[int, bool], ...]:
    return ((wanted, True), (targets, True), (entries, False))


def _keep(kept: dict[K, V], key: K, value: V) -> None:
    if len(kept) == KNOWN:
        kept.clear()
    kept[key] = value


def end_of(shape: StepShape, first: int) -> int:
    """First byte after the fields of a step of ``shape`` that begin at ``first``."""
    return first + sum(_padded(*each) for each in _field_sizes(shape))
