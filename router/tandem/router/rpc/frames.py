"""Bytes of a connection as whole frames, so that the plainest need no state machine.

A client that reads a stream says by WINDOW_UPDATE that it has, and asks by PING how far it is, for
every few tokens; ``h2`` takes 40 µs for each. ``http2`` answers these by hand. All else, and
whatever is not as it should be, goes to ``h2`` as it came.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

PING = 6
GOAWAY = 7
WINDOW_UPDATE = 8
_HEADERS = 1
_CONTINUATION = 9
_END_HEADERS = 4
_PREFACE = 24
_HEAD = struct.Struct(">IBI")


class Frame(NamedTuple):
    """One frame; ``is_plain`` says that it stands alone, not within a block of headers."""

    kind: int
    flags: int
    stream_id: int
    whole: bytes
    is_plain: bool


class Frames:
    """What came of one connection and is not a whole frame yet: less than one frame."""

    def __init__(self, max_frame_bytes: int) -> None:
        self._most = max_frame_bytes
        self._rest = b""
        self._is_greeted = False
        self._in_headers = False

    def split(self, data: bytes) -> Iterator[Frame]:
        """The whole frames so far. One that is too long is given as far as it came."""
        data = self._rest + data
        at = 0
        if not self._is_greeted:
            if len(data) < _PREFACE:
                self._rest = data
                return
            self._is_greeted, at = True, _PREFACE
            yield Frame(-1, 0, 0, data[:at], False)
        while len(data) - at >= _HEAD.size:
            head, flags, stream_id = _HEAD.unpack_from(data, at)
            size, kind = head >> 8, head & 0xFF
            if size > self._most:
                yield Frame(kind, flags, stream_id, data[at:], False)
                at = len(data)
                break
            end = at + _HEAD.size + size
            if end > len(data):
                break
            is_plain = not self._in_headers
            if kind in (_HEADERS, _CONTINUATION):
                self._in_headers = not flags & _END_HEADERS
            yield Frame(kind, flags, stream_id & 0x7FFF_FFFF, data[at:end], is_plain)
            at = end
        self._rest = data[at:]
