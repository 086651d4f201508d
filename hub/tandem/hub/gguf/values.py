"""Numbers, texts and lists of a GGUF file's bytes, each within a bound.

A file is untrusted. A fault raises ``Malformed`` with a description, or ``EndOfFile``, before any
work or memory of the size that the file claims.
"""

import struct
from enum import IntEnum
from typing import Any

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_KEYS = 4_096
MAX_NAME_BYTES = 1_024
"""Most bytes of a key, or of a tensor's name."""
MAX_TEXT_BYTES = 16 << 20
MAX_VALUES = 4_000_000
"""Values of all lists together: a vocabulary of 500,000 tokens has some 2,000,000."""


class Malformed(Exception):
    """A malformed file; the text names the fault."""


class EndOfFile(Exception):
    """A file ends before the content that it declares; sizes in bytes."""

    def __init__(self, has: int, wants: int) -> None:
        self.has = has
        self.wants = wants
        super().__init__(has, wants)


class Kind(IntEnum):
    """Types of values, by their numbers in a file."""

    BOOL = 7
    STRING = 8
    ARRAY = 9


_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    Kind.BOOL: "B",
    10: "Q",
    11: "q",
    12: "d",
}
"""struct's format characters for types of one size."""


class Values:
    """Reader of a file's bytes in order, after its magic number."""

    def __init__(self, content: memoryview) -> None:
        """Read the version. Raises Malformed for an unknown one."""
        self._content = content
        self._left = MAX_VALUES
        self.at = len(MAGIC)
        raw = bytes(self._take(4))
        self.order = "<" if int.from_bytes(raw, "little") & 0xFFFF else ">"  # versions are small
        version = int.from_bytes(raw, "little" if self.order == "<" else "big")
        if version not in VERSIONS:
            raise Malformed(f"GGUF version {version}; {', '.join(map(str, VERSIONS))} are read")

    @property
    def size(self) -> int:
        """Return the number of bytes."""
        return len(self._content)

    def count(self, what: str, most: int) -> int:
        """Return the next count."""
        count = self.number("Q")
        if count > most:
            raise Malformed(f"{count} {what}; at most {most} are read")
        return count

    def number(self, kind: str) -> int:
        """Return the next number, of one of struct's kinds."""
        form = struct.Struct(self.order + kind)
        number: int = form.unpack(self._take(form.size))[0]
        return number

    def text(self, what: str, most: int = MAX_NAME_BYTES) -> str:
        """Return the next text."""
        try:
            return bytes(self._text(what, most)).decode()
        except UnicodeDecodeError:
            raise Malformed(f"{what} is a text that is not UTF-8") from None

    def value(self, kind: int, name: str) -> Any:
        """Return the value of a key: a number, a bool, a text, or a list of them."""
        if kind == Kind.ARRAY:
            kind, count = self.list_head(name)
            if kind == Kind.STRING:
                return [self.text(name, MAX_TEXT_BYTES) for _ in range(count)]
            return self._scalars(kind, count, name)
        if kind == Kind.STRING:
            return self.text(name, MAX_TEXT_BYTES)
        return self._scalars(kind, 1, name)[0]

    def list_head(self, name: str) -> tuple[int, int]:
        """Return the type of a list's values, and their number."""
        kind, count = self.number("I"), self.number("Q")
        if kind == Kind.ARRAY:
            raise Malformed(f"{name} is a list of lists, which are not read")
        self._left -= count
        if self._left < 0:
            raise Malformed(f"lists of more than {MAX_VALUES:,} values in all, at {name}")
        return kind, count

    def skip_list(self, kind: int, count: int, name: str) -> None:
        """Skip the values of a list whose head was read."""
        if kind == Kind.STRING:
            for _ in range(count):
                self._text(name, MAX_TEXT_BYTES)
        else:
            self._take(struct.calcsize(self.order + self._form(kind, name)) * count)

    def _scalars(self, kind: int, count: int, name: str) -> list[Any]:
        form = struct.Struct(f"{self.order}{count}{self._form(kind, name)}")
        found = list(form.unpack(self._take(form.size)))
        if kind != Kind.BOOL:
            return found
        if any(each > 1 for each in found):
            raise Malformed(f"{name} is neither true nor false")
        return [each == 1 for each in found]

    def _form(self, kind: int, name: str) -> str:
        if kind not in _SCALARS:
            raise Malformed(f"{name} is of type {kind}, which is not known")
        return _SCALARS[kind]

    def _text(self, what: str, most: int) -> memoryview:
        length = self.number("Q")
        if length > most:
            raise Malformed(f"{what} is a text of {length} bytes; at most {most} are read")
        return self._take(length)

    def _take(self, size: int) -> memoryview:
        end = self.at + size
        if end > len(self._content):
            raise EndOfFile(len(self._content), end)
        taken = self._content[self.at : end]
        self.at = end
        return taken
