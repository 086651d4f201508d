"""Frames between an engine and a rank in another process, over stream sockets.

Either end sees at once that the other has closed. A frame is its length in 8 bytes and its content;
descriptors are sent between frames, over Unix sockets only.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time

from tandem.protocol.errors import TandemError

_LENGTH = struct.Struct("<Q")
MOST_BYTES = 1 << 32
_CHUNK = 1 << 20


class ChannelClosed(TandemError):
    """The other end has closed."""


class Channel:
    """One end. One thread sends, one receives."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        end.setblocking(False)
        self._received = bytearray()
        self._size: int | None = None
        """Size of the frame under way, once its length has been received."""

    @property
    def sends_descriptors(self) -> bool:
        """Return whether both ends are on one machine."""
        return self._socket.family == socket.AF_UNIX

    def fileno(self) -> int:
        """Return the descriptor, which is readable if a frame begins or the other end closed."""
        return self._socket.fileno()

    def send(self, *parts: bytes, seconds: float) -> None:
        """Send one frame. Raises ChannelClosed, or TimeoutError, after which the channel is
        unusable."""
        deadline = time.monotonic() + seconds
        frame = memoryview(b"".join((_LENGTH.pack(sum(map(len, parts))), *parts)))
        while frame:
            try:
                sent = self._socket.send(frame)
            except BlockingIOError:
                self._wait(select.POLLOUT, deadline)
            except OSError as error:
                raise ChannelClosed(str(error)) from error
            else:
                frame = frame[sent:]

    def receive(self, *, seconds: float | None, most: int = MOST_BYTES) -> bytes:
        """Return the next frame. Raises ChannelClosed, also for more than ``most`` bytes, or
        TimeoutError, after which the next call continues. ``seconds`` None waits until the other
        end closes."""
        deadline = None if seconds is None else time.monotonic() + seconds
        if self._size is None:
            self._size = _LENGTH.unpack(self._take(_LENGTH.size, deadline))[0]
        if self._size > most:
            raise ChannelClosed(f"a frame of {self._size} bytes is none of this channel's")
        frame = self._take(self._size, deadline)
        self._size = None
        return frame

    def send_descriptor(self, descriptor: int) -> None:
        socket.send_fds(self._socket, [b"\0"], [descriptor])

    def receive_descriptor(self, *, seconds: float) -> int:
        """Receive a file. Raises ChannelClosed, TimeoutError."""
        assert self._size is None, "a descriptor comes between two frames"
        assert not self._received, "a descriptor comes between two frames"
        self._wait(select.POLLIN, time.monotonic() + seconds)
        _, descriptors, _, _ = socket.recv_fds(self._socket, 1, 1)
        if not descriptors:
            raise ChannelClosed("the other end closed before it sent a descriptor")
        return descriptors[0]

    def close(self) -> None:
        """Close this end. May be called twice."""
        self._socket.close()

    def _take(self, count: int, deadline: float | None) -> bytes:
        received = self._received
        while len(received) < count:
            try:
                # No more than is missing: a descriptor may follow the frame.
                part = self._socket.recv(min(count - len(received), _CHUNK))
            except BlockingIOError:
                self._wait(select.POLLIN, deadline)
                continue
            except OSError as error:
                raise ChannelClosed(str(error)) from error
            if not part:
                raise ChannelClosed("the other end closed")
            received += part
        taken = bytes(received)
        received.clear()
        return taken

    def _wait(self, what: int, deadline: float | None) -> None:
        poller = select.poll()
        poller.register(self._socket, what)
        while True:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError("the other end of the channel does not answer")
            if poller.poll(None if left is None else left * 1000):
                return


def inherited(descriptor: int) -> Channel:
    """Return the end that a parent process left open under ``descriptor``."""
    os.set_inheritable(descriptor, False)
    return Channel(socket.socket(fileno=descriptor))
