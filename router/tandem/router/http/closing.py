"""Orderly close of a connection: send what was written, read what the client still sends.

A socket that is closed with unread bytes resets its connection, and the end of an answer is lost.
So the sending half is closed first (RFC 9112, section 9.6).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

MIN_DRAINED = 16 << 10
"""Bytes that a slow reader must accept in each period."""
LINGER_SECONDS = 1.0
"""Seconds for a client to close its half."""
LINGER_BYTES = 1 << 20
"""Maximum bytes from the client in that time."""

DRAIN_RATE = 16 << 20
"""Bytes per second that are read and discarded of one connection."""
PACED_BYTES = 16 << 10
"""Minimum bytes that cause a pause."""


class Closing:
    """End of one connection, with its one deadline."""

    def __init__(self, transport: asyncio.Transport, write_seconds: float) -> None:
        """Written bytes must progress in each ``write_seconds``."""
        self._transport = transport
        self._write_seconds = write_seconds
        self._loop = asyncio.get_running_loop()
        self._deadline: asyncio.TimerHandle | None = None
        self._linger: asyncio.TimerHandle | None = None
        self._unsent = 0
        self._seconds = LINGER_SECONDS
        self._room = LINGER_BYTES
        self.has_begun = False
        """Whether received bytes are discarded."""

    def is_over(self) -> bool:
        """Return whether the connection is closing or closed."""
        return self.has_begun or self._transport.is_closing()

    def begin(self, seconds: float | None = None, num_bytes: int | None = None) -> None:
        """Close after the written bytes were sent and the client has left.

        The client has ``seconds`` and may send ``num_bytes``.
        """
        if self.is_over():
            return
        self.has_begun = True
        self._seconds = LINGER_SECONDS if seconds is None else seconds
        self._room = LINGER_BYTES if num_bytes is None else num_bytes
        try:
            self._transport.write_eof()
        except OSError:  # the client has left
            self._transport.abort()
            return
        self._transport.resume_reading()
        self.watch()
        self._wait()

    def hurry(self) -> None:
        """Shorten the client's time to ``LINGER_SECONDS``."""
        if self._linger is not None and self._seconds > LINGER_SECONDS:
            self._linger.cancel()
            self._seconds = LINGER_SECONDS
            self._wait()

    def count_read(self, num_bytes: int) -> None:
        """Count and pace discarded bytes."""
        self._room -= num_bytes
        if self._room < 0:
            self._transport.close()
        elif num_bytes >= PACED_BYTES and not self._transport.is_closing():
            self._transport.pause_reading()
            self._loop.call_later(num_bytes / DRAIN_RATE, self._read_on)

    def _read_on(self) -> None:
        if not self._transport.is_closing():
            self._transport.resume_reading()

    def is_lingering(self) -> bool:
        """Return whether only the client's close is awaited."""
        return self.has_begun and not self._transport.get_write_buffer_size()

    def lost(self) -> None:
        self.disarm()
        if self._linger is not None:
            self._linger.cancel()

    def watch(self) -> None:
        """Require that written bytes progress in each period."""
        self._unsent = self._transport.get_write_buffer_size()
        self.arm(self._write_seconds, self._check_drained)

    def arm(self, seconds: float, late: Callable[[], None]) -> None:
        """Call ``late`` after ``seconds``, instead of the previous call."""
        self.disarm()
        self._deadline = self._loop.call_later(seconds, late)

    def disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _check_drained(self) -> None:
        left = self._transport.get_write_buffer_size()
        if self._unsent - left < min(MIN_DRAINED, self._unsent):
            self._transport.abort()
            return
        self.watch()

    def _end(self) -> None:
        """Close, unless a write is in progress, which has its own deadline."""
        if self.is_lingering():
            self._transport.close()
        else:
            self._wait()

    def _wait(self) -> None:
        self._linger = self._loop.call_later(self._seconds, self._end)
