"""Bytes of a connection as whole frames, so that the plainest need no state machine.

A client that reads a stream says by WINDOW_UPDATE that it has, and asks by PING how far it is, for
every few tokens; ``h2`` takes 40 µs for each. ``http2`` answers these by hand. All else, and
whatever is not as it should be, goes to ``h2`` as it came.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

DATA = 0
HEADERS = 1
PING = 6
_GOAWAY = 7
WINDOW_UPDATE = 8
_CONTINUATION = 9
_END_HEADERS = 4
_PREFACE = 24
_HEAD = struct.Struct(">IBI")
_PING_BYTES = _MIN_GOAWAY_BYTES = _HEAD.size + 8
_WINDOW_UPDATE_BYTES = _HEAD.size + 4
_PONG = b"\0\0\x08\x06\x01\0\0\0\0"


class Frame(NamedTuple):
    """One frame; ``is_plain`` says that it stands alone, not within a block of headers."""

    kind: int
    flags: int
    stream_id: int
    whole: bytes
    is_plain: bool


class Frames:
    """What came of one connection and was not taken yet; between turns less than one frame."""

    def __init__(self, max_frame_bytes: int) -> None:
        self._most = max_frame_bytes
        self._data = b""
        self._at = 0
        """Where in it the next frame begins."""
        self._is_greeted = False
        self._in_headers = False

    def add(self, data: bytes) -> None:
        """Bytes came."""
        self._data = self._data[self._at :] + data
        self._at = 0

    def split(self) -> Iterator[Frame]:
        """The whole frames so far; who takes some of them finds the others at the next call. One
        that is too long is given as far as it came."""
        data = self._data
        if not self._is_greeted:
            if len(data) < _PREFACE:
                return
            self._is_greeted, self._at = True, _PREFACE
            yield Frame(-1, 0, 0, data[:_PREFACE], False)
        while len(data) - (at := self._at) >= _HEAD.size:
            head, flags, stream_id = _HEAD.unpack_from(data, at)
            size, kind = head >> 8, head & 0xFF
            if size > self._most:
                self._at = len(data)
                yield Frame(kind, flags, stream_id, data[at:], False)
                break
            end = at + _HEAD.size + size
            if end > len(data):
                break
            is_plain = not self._in_headers
            if kind in (HEADERS, _CONTINUATION):
                self._in_headers = not flags & _END_HEADERS
            self._at = end
            yield Frame(kind, flags, stream_id & 0x7FFF_FFFF, data[at:end], is_plain)
        self.add(b"")  # what was taken is let go of


def pong_to(frame: Frame) -> bytes | None:
    """The answer to a plain PING; None for all else."""
    is_ping = frame.kind == PING and len(frame.whole) == _PING_BYTES
    if not is_ping or frame.flags | frame.stream_id or not frame.is_plain:
        return None
    return _PONG + frame.whole[_HEAD.size :]


def takes_leave(frame: Frame) -> bool:
    """Whether it is a plain GOAWAY without an error."""
    if frame.kind != _GOAWAY or frame.stream_id or not frame.is_plain:
        return False
    whole = frame.whole
    return len(whole) >= _MIN_GOAWAY_BYTES and not any(whole[_HEAD.size + 4 : _MIN_GOAWAY_BYTES])


def room_of(frame: Frame) -> int:
    """Bytes that a plain WINDOW_UPDATE makes room for; 0 for all else."""
    is_update = frame.kind == WINDOW_UPDATE and len(frame.whole) == _WINDOW_UPDATE_BYTES
    if not is_update or not frame.is_plain:
        return 0
    return int.from_bytes(frame.whole[_HEAD.size :], "big") & 0x7FFF_FFFF
