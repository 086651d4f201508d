"""Headers of HTTP/2: those of a call as texts, its deadline, and how large their table grows."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from h2.connection import H2Connection
from hpack import Decoder, HeaderTuple
from hpack.exceptions import OversizedHeaderListError

_TABLE_BYTES = 4_096
"""Of headers said before, which later ones name by their number: what HTTP/2 begins with."""
_TIMEOUT = re.compile(r"(\d{1,8})([HMSmun])")
_UNITS = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}


class BoundedDecoder(Decoder):
    """Takes so many headers at most in one block.

    One byte names a header of the table, so that the bytes of a block bound its headers too late: a
    block of two kilobytes takes as long as a hundred calls.
    """

    def __init__(self, most: int, num_bytes: int) -> None:
        super().__init__(max_header_list_size=num_bytes)
        self._most = most
        self._left = most

    def decode(self, data: bytes, raw: bool = False) -> Iterable[HeaderTuple]:
        """Decode a block. Raises HPACKError."""
        self._left = self._most
        return super().decode(data, raw)

    def _decode_indexed(self, data: bytes | memoryview) -> tuple[HeaderTuple, int]:
        self._count()
        return super()._decode_indexed(data)

    def _decode_literal(
        self, data: bytes | memoryview, should_index: bool
    ) -> tuple[HeaderTuple, int]:
        self._count()
        return super()._decode_literal(data, should_index)

    def _count(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise OversizedHeaderListError(f"more than {self._most} headers")


def headers_of(given: Iterable[tuple[bytes | str, bytes | str]] | None) -> dict[str, str]:
    """By their names; the last one of a name."""
    return {_text(name): _text(value) for name, value in given or ()}


def timeout_of(headers: Mapping[str, str]) -> float | None:
    """Seconds that a client gives its call; None where it says none, or nonsense."""
    found = _TIMEOUT.fullmatch(headers.get("grpc-timeout", ""))
    return found and int(found[1]) * _UNITS[found[2]]


def bound_table(h2: H2Connection) -> None:
    """The client says how large a table of headers it keeps; each answer would look through all of
    it here."""
    encoder = h2.encoder
    if encoder.header_table_size > _TABLE_BYTES:
        encoder.header_table_size = _TABLE_BYTES
    changes = encoder.table_size_changes
    if len(changes) > 2:  # that are to be told: the smallest and the last say all
        changes[:] = min(changes), changes[-1]


def _text(value: bytes | str) -> str:
    return value if isinstance(value, str) else value.decode("latin-1")
