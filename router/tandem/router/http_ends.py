"""The ends of HTTP connections, by an answer, a limit, or a router that stops.

uvicorn closes the socket. An answer that is sent while its client still sends is lost with it (see
``closing``). Of pipelined requests, uvicorn reports the disconnect to the last alone. So uvicorn
has a transport whose ``close`` begins an orderly close, and all requests get the disconnect.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar

from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from tandem.router.closing import Closing
from tandem.router.http_limits import ConnectionLimits
from tandem.router.http_protocol import JoinedProtocol, UnchunkedCycle

HEARD_BEHIND = 8
"""Pipelined requests up to which the client is still read."""


class Outlet(asyncio.Transport):
    """Transport that uvicorn gets for a connection; closing it begins an orderly close."""

    def __init__(
        self, transport: asyncio.Transport, closing: Closing, end: Callable[[], None]
    ) -> None:
        super().__init__()
        self._transport = transport
        self._closing = closing
        self._end = end
        self.write = transport.write  # type: ignore[method-assign]  # no call more for a token

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """See Transport."""
        return self._transport.get_extra_info(name, default)

    def get_write_buffer_size(self) -> int:
        """See Transport."""
        return self._transport.get_write_buffer_size()

    def pause_reading(self) -> None:
        """See Transport; of a connection that ends all is read."""
        if not self._closing.has_begun:
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """See Transport."""
        self._transport.resume_reading()

    def is_closing(self) -> bool:
        """See Transport."""
        return self._closing.is_over()

    def close(self) -> None:
        """See Transport."""
        self._end()

    def abort(self) -> None:
        """See Transport."""
        self._transport.abort()

    def ended(self) -> None:
        """Drop what is written from now on."""
        self.write = _nowhere  # type: ignore[method-assign, assignment]

    def lost(self) -> None:
        """Drop the connection: there is nothing to close any more."""
        self.ended()
        self._end = _nothing


class EndingProtocol(JoinedProtocol):
    """A connection that ends in order."""

    limits: ClassVar[ConnectionLimits] = ConnectionLimits()
    ending: ClassVar[dict[EndingProtocol, None]] = {}
    """Connections whose end has begun, the oldest first."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.cycles: deque[RequestResponseCycle] = deque()
        """Requests without their whole answer; the first is being answered, the rest wait."""
        self._is_stopping = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin a connection of a client."""
        self.closing = Closing(transport, self.limits.write_seconds)
        self._outlet = Outlet(transport, self.closing, self.end)
        super().connection_made(self._outlet)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the deadlines."""
        self.closing.lost()
        self.ending.pop(self, None)
        self._outlet.lost()
        self._give_up_requests()
        super().connection_lost(exc)

    def eof_received(self) -> None:
        """Let the loop close once unsent bytes have gone: the client has closed its half."""
        if self._breaks_off():
            self._outlet.abort()
        else:
            self.closing.watch()

    def on_headers_complete(self) -> None:
        """Add a request to the cycles."""
        super().on_headers_complete()
        self.cycles.append(self.cycle)
        # uvicorn reads nothing more where one waits behind another, and so of nobody who leaves.
        waiting = [len(cycle.body) for cycle, _ in self.pipeline]
        if 0 < len(waiting) <= HEARD_BEHIND and sum(waiting) < HIGH_WATER_LIMIT:
            self.flow.resume_reading()

    def on_response_complete(self) -> None:
        """Remove the answered request."""
        if self.cycles:
            self.cycles.popleft()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Watch the progress of writes: the client reads more slowly than it is sent to."""
        super().pause_writing()
        self.closing.watch()

    def resume_writing(self) -> None:
        """Stop the watch, since the client reads on; an ending connection is watched to its end."""
        if not self.closing.is_over():
            self.closing.disarm()
        super().resume_writing()

    def shutdown(self) -> None:
        """Stop with the server, without waiting for clients that have yet to send something."""
        self._is_stopping = True
        super().shutdown()
        self.closing.hurry()

    def is_owed(self) -> bool:
        """Return whether the client has yet to send the rest of a request."""
        return False

    def end(self) -> None:
        """Write nothing more, and close after the client has received what was written. Close at
        once if it would take a part for the whole."""
        if self.closing.is_over():
            return
        breaks_off = self._breaks_off()
        self.ending[self] = None
        self._give_up_requests()
        if breaks_off:
            self._outlet.abort()
        elif self.is_owed():
            seconds = None if self._is_stopping else self.limits.unwanted_seconds
            self.closing.begin(seconds, self.limits.unwanted_bytes)
        else:
            self.closing.begin()
        self._outlet.ended()

    def is_lingering(self) -> bool:
        """Return whether all is written and only the client's close is awaited."""
        return self.closing.is_lingering()

    def _breaks_off(self) -> bool:
        """Return whether an orderly close would make a part of an answer seem complete."""
        answer = self.cycles[0] if self.cycles else None
        return isinstance(answer, UnchunkedCycle) and answer.would_seem_whole()

    def _give_up_requests(self) -> None:
        """Disconnect all requests: no answer is read any more, and no next request is awaited."""
        for cycle in self.cycles:
            cycle.disconnected = True
            cycle.message_event.set()
        self.cycles.clear()
        self.pipeline.clear()
        self.flow.resume_writing()
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
            self.timeout_keep_alive_task = None


def _nowhere(_: bytes | bytearray | memoryview) -> None:
    """Discard the data."""


def _nothing() -> None:
    """Do nothing."""
