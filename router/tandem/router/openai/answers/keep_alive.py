"""Comments for streams that have nothing to send, so that no proxy takes them for dead.

One timer for all streams of an app. It runs only while there are streams.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import islice
from typing import Protocol

COMMENT = b": keep-alive\n\n"
"""A line that every reader of server-sent events skips."""
AT_ONCE = 32
"""Streams that are checked in one round of the loop; tokens of other streams go out in between."""


class Stream(Protocol):
    """A stream whose headers were sent."""

    def keep_alive(self) -> None:
        """Send a comment if nothing was sent since the last call. Returns at once."""
        ...


class KeepAlives:
    """Calls every stream twice in ``seconds``, so that no silence is longer; never if that is 0."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._streams: dict[Stream, None] = {}
        self._timer: asyncio.Handle | None = None

    @property
    def are_sent(self) -> bool:
        """Return whether streams are opened early and kept alive."""
        return self._seconds > 0

    def add(self, stream: Stream) -> None:
        """Keep a stream alive until ``discard``."""
        if not self.are_sent:
            return
        self._streams[stream] = None
        if self._timer is None:
            self._rest()

    def discard(self, stream: Stream) -> None:
        """Remove an ended stream. May be called for one that was never added."""
        self._streams.pop(stream, None)

    def _rest(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._seconds / 2, self._begin)

    def _begin(self) -> None:
        self._go_on(iter(list(self._streams)))

    def _go_on(self, left: Iterator[Stream]) -> None:
        some = list(islice(left, AT_ONCE))
        for stream in some:
            if stream in self._streams:
                stream.keep_alive()
        if len(some) == AT_ONCE:
            self._timer = asyncio.get_running_loop().call_soon(self._go_on, left)
        elif self._streams:
            self._rest()
        else:
            self._timer = None
