"""A finite automaton over bytes as plain arrays, and the one form in which it leaves the process
that made it.

State 0 is the dead one: nothing leads out of it. Bytes that lead everywhere to the same states
share a column, of which there are some ten to a hundred.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

_HEADER = struct.Struct("<4sIII")
_MAGIC = b"TDF1"
MAX_STATES = 100_000
MAX_CELLS = 1 << 22
"""States times columns; 4 bytes each."""
MAX_BYTES = _HEADER.size + 256 + MAX_STATES + 1 + 4 * MAX_CELLS
"""Of a table that is packed."""
BYTES = 256
TOO_LARGE = f"what has at most {MAX_STATES:,} states and {MAX_CELLS:,} cells of them"


class TableError(ValueError):
    """A table that is none, or larger than any may be."""


@dataclass(frozen=True, slots=True)
class Tables:
    """One automaton; nothing changes it."""

    columns: npt.NDArray[np.uint8]
    """[256]: column of a byte."""
    accepting: npt.NDArray[np.uint8]
    """[states]: 1 where a text may end."""
    after: npt.NDArray[np.int32]
    """[states, columns]: the state that follows; 0 where none does."""
    initial: int

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        return self.columns.nbytes + self.accepting.nbytes + self.after.nbytes

    def pack(self) -> bytes:
        """As bytes, of which ``unpack`` makes it again."""
        states, columns = self.after.shape
        header = _HEADER.pack(_MAGIC, states, columns, self.initial)
        arrays = (self.columns, self.accepting, self.after)
        return b"".join((header, *(each.tobytes() for each in arrays)))


def unpack(data: bytes) -> Tables:
    """The table in ``data``, whoever wrote it: every index is within its bounds. Raises
    TableError."""
    if len(data) < _HEADER.size:
        raise TableError(f"{len(data)} bytes are no table")
    magic, states, columns, initial = _HEADER.unpack_from(data)
    if magic != _MAGIC or not (2 <= states <= MAX_STATES + 1 and 1 <= columns <= BYTES):
        raise TableError(f"a header of {states} states and {columns} columns is no table's")
    cells = states * columns
    if cells > MAX_CELLS or len(data) != _HEADER.size + BYTES + states + 4 * cells:
        raise TableError(f"{len(data)} bytes are no table of {states} states")
    at = _HEADER.size
    byte_columns = np.frombuffer(data, np.uint8, BYTES, at)
    accepting = np.frombuffer(data, np.uint8, states, at + BYTES)
    after = np.frombuffer(data, "<i4", cells, at + BYTES + states)
    wrong = int(after.min()) < 0 or int(after.max()) >= states or after[:columns].any()
    if wrong or byte_columns.max() >= columns or accepting[0] or not 0 < initial < states:
        raise TableError("a table that leads out of itself")
    return Tables(byte_columns, accepting, after.reshape(states, columns), initial)


def made_of(
    transitions: Mapping[int, Mapping[int, int]], final: set[int], first: int, initial: int
) -> Tables:
    """The table of an index whose tokens are the 256 bytes: by states, which are any numbers, the
    state behind each byte; keys beyond 255 are not bytes. ``first`` is the byte that every text of
    the index begins with and that is left out, ``initial`` the state before it. Raises TableError
    where there are too many."""
    if len(transitions) > MAX_STATES:
        raise TableError(TOO_LARGE)
    names = np.fromiter(transitions, np.int64, len(transitions))
    order = np.argsort(names)
    sizes = np.fromiter(map(len, transitions.values()), np.int64, len(transitions))
    count = int(sizes.sum())
    rows = np.repeat(np.arange(len(names)), sizes)
    keys = np.fromiter(chain.from_iterable(transitions.values()), np.int64, count)
    values = chain.from_iterable(each.values() for each in transitions.values())
    targets = order[np.searchsorted(names[order], np.fromiter(values, np.int64, count))]
    known = keys < BYTES
    whole = np.zeros((len(names) + 1, BYTES), np.int32)
    whole[rows[known] + 1, keys[known]] = targets[known] + 1
    numbers = {int(name): at + 1 for at, name in enumerate(names)}
    kinds: dict[bytes, int] = {}
    columns = np.zeros(BYTES, np.uint8)
    chosen: list[int] = []
    for byte, column in enumerate(np.ascontiguousarray(whole.T)):
        kind = kinds.setdefault(column.tobytes(), len(kinds))
        columns[byte] = kind
        if kind == len(chosen):
            chosen.append(byte)
    if len(whole) * len(chosen) > MAX_CELLS:
        raise TableError(TOO_LARGE)
    accepting = np.zeros(len(whole), np.uint8)
    accepting[[numbers[each] for each in final if each in numbers]] = 1
    start = int(whole[numbers[initial], first])
    if start == 0:
        raise TableError("what some text matches")
    after = np.ascontiguousarray(whole[:, chosen])
    return Tables(columns, accepting, after, start)
