"""Size of the head of a GGUF file: its keys and descriptions of tensors, found in milliseconds.

Computed each time a file is named, to find its converted folder again. The ``gguf`` package's
reader makes an array of every string, which takes seconds for a vocabulary. Values are skipped, not
read; the reader checks them.
"""

import mmap
import struct
from pathlib import Path

_MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
_MAX_COUNT = 4_000_000
"""Most keys, tensors, or values of a list. No model has more of them, or lists in lists."""
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of a value by its type's number, of those that are of one size."""
_AFTER_DIMS = 4 + 8
"""Bytes of a tensor's type and offset."""


def head_bytes(path: Path) -> int:
    """Return the bytes of ``path`` before its tensors' values, without padding. Raises OSError.
    Return 0 for a file that is not a whole GGUF file, or has unknown types."""
    with path.open("rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            return 0
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            try:
                end = _Walk(content).end()
            except (struct.error, KeyError, OverflowError):
                return 0
            return end if end <= len(content) else 0


class _Walk:
    """Walk over the head of a file. Raises struct.error at its end, KeyError for an unknown type,
    OverflowError for sizes that no writer makes."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content = content
        self._at = len(_MAGIC)
        self._left = _MAX_COUNT
        (version,) = struct.unpack_from("<I", content, self._at)
        self._at += 4
        order = "<" if version & 0xFFFF else ">"  # whoever wrote it, versions are small
        self._u32, self._u64 = struct.Struct(f"{order}I"), struct.Struct(f"{order}Q")

    def end(self) -> int:
        """Return the offset after the last tensor's description."""
        tensors, keys = self._number(self._u64), self._number(self._u64)
        self._left -= tensors + keys
        if self._left < 0:
            raise OverflowError
        for _ in range(keys):
            self._strings(1)
            self._values(self._number(self._u32), 1)
        for _ in range(tensors):
            self._strings(1)
            dims = self._number(self._u32)
            self._at += 8 * dims + _AFTER_DIMS
        return self._at

    def _number(self, kind: struct.Struct) -> int:
        number: int = kind.unpack_from(self._content, self._at)[0]
        self._at += kind.size
        return number

    def _values(self, kind: int, count: int) -> None:
        if kind == _STRING:
            self._strings(count)
        elif kind == _ARRAY:
            inner, size = self._number(self._u32), self._number(self._u64)
            self._left -= size
            if inner == _ARRAY or self._left < 0:
                raise OverflowError
            self._values(inner, size)
        else:
            self._at += _SIZES[kind] * count

    def _strings(self, count: int) -> None:
        content, length_at, at = self._content, self._u64.unpack_from, self._at
        for _ in range(count):
            at += 8 + length_at(content, at)[0]
        self._at = at
