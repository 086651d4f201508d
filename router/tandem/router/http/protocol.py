"""Ends of HTTP connections, by an answer, a limit, or a shutdown.

uvicorn closes a socket at once and loses the answer of a client that still sends. So its
transport's ``close`` begins an orderly close, and all pipelined requests get the disconnect.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import httptools
from uvicorn._types import ASGISendEvent
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from tandem.router.http.closing import Closing
from tandem.router.http.errors import ErrorAnswer

_DROPPED = frozenset({b"upgrade", b"http2-settings"})


class Receiver(Protocol):
    """Connection of a parser."""

    url: bytes
    headers: list[tuple[bytes, bytes]]

    def on_message_begin(self) -> None: ...
    def on_url(self, url: bytes) -> None: ...
    def on_header(self, name: bytes, value: bytes) -> None: ...
    def on_headers_complete(self) -> None: ...
    def on_body(self, body: bytes) -> None: ...
    def on_message_complete(self) -> None: ...
    def on_head_again(self) -> None:
        """Note that the parts of this head come again."""


class RequestParser:
    """httptools' parser with the methods that uvicorn calls."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self.on_message_begin = receiver.on_message_begin
        self.on_url = receiver.on_url
        self.on_header = receiver.on_header
        self.on_body = receiver.on_body
        self._begin()

    def _begin(self) -> None:
        self._upgrades = False
        self._parser = httptools.HttpRequestParser(self)
        # As uvicorn: bytes after the last request of a connection are no error.
        self._parser.set_dangerous_leniencies(lenient_data_after_close=True)

    def close(self) -> None:
        del self._parser

    def feed_data(self, data: bytes) -> None:
        while True:
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                head = self._plain_head()
                self._receiver.on_head_again()
                self._begin()
                data = head + data[upgrade.args[0] :]
            else:
                return

    def on_headers_complete(self) -> None:
        """Pass a head on, unless it comes again without its upgrade."""
        self._upgrades = self._parser.should_upgrade()
        if not self._upgrades:
            self._receiver.on_headers_complete()
        elif self._parser.get_method() == b"CONNECT":
            raise httptools.HttpParserError("CONNECT is not supported")

    def on_message_complete(self) -> None:
        if not self._upgrades:
            self._receiver.on_message_complete()

    def get_http_version(self) -> str:
        version: str = self._parser.get_http_version()
        return version

    def get_method(self) -> bytes:
        method: bytes = self._parser.get_method()
        return method

    def should_keep_alive(self) -> bool:
        keeps: bool = self._parser.should_keep_alive()
        return keeps

    def should_upgrade(self) -> bool:
        return False

    def _plain_head(self) -> bytes:
        receiver, version = self._receiver, self.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.get_method(), receiver.url, version)]
        for name, value in receiver.headers:
            if name == b"connection":
                options = [each.strip() for each in value.split(b",")]
                value = b", ".join(each for each in options if each.lower() not in _DROPPED)
            if name not in _DROPPED and (value or name != b"connection"):
                lines.append(b"%b: %b" % (name, value))
        return b"\r\n".join([*lines, b"", b""])


def framing_problem(version: str, headers: list[tuple[bytes, bytes]]) -> str | None:
    """Return why the end of a request is ambiguous, or None (RFC 9112, section 6)."""
    if version not in ("1.0", "1.1"):
        return f"HTTP/{version} is not served here; HTTP/1.1 is"
    codings = [value for name, value in headers if name == b"transfer-encoding"]
    if codings and version == "1.0":
        return "Transfer-Encoding: not allowed in HTTP/1.0; Content-Length is"
    if codings and [value.strip().lower() for value in codings] != [b"chunked"]:
        text = b", ".join(codings)[:64].decode("latin-1")
        return f"Transfer-Encoding: {text!r} is not allowed; only chunked is"
    if sum(name == b"host" for name, _ in headers) > 1:
        return "Host: given more than once"
    return None


def host_of(url: bytes) -> bytes | None:
    """Return the host of an absolute URL, which overrides the header's; None for a path.

    RFC 9112, section 3.2.2.
    """
    if url.startswith(b"/"):
        return None
    _, found, rest = url.partition(b"://")
    return rest.partition(b"/")[0].partition(b"?")[0].rpartition(b"@")[2] if found else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Limits of one connection, and of all together."""

    head_bytes: int = 64 << 10
    headers: int = 128
    head_seconds: float = 10.0
    body_seconds: float = 60.0
    unwanted_seconds: float = 5.0
    """Seconds for the rest of a body after its answer."""
    unwanted_bytes: int = 64 << 20
    """Bytes of such a rest: many clients read nothing before it."""
    write_seconds: float = 30.0
    connections: int = 4096
    connections_per_client: int = 0
    """Connections per address; 0 is any number, as behind a proxy."""


def written(answer: ErrorAnswer) -> bytes:
    """Return the bytes of the last answer of a connection."""
    body = answer.body
    lines = [STATUS_LINE[answer.status], b"content-type: application/json\r\n"]
    lines += [
        f"{name}: {value}\r\n".encode()
        for name, value in answer.headers.items()
        if name.lower() != "connection"
    ]
    lines += [b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body), body]
    return b"".join(lines)


def head_too_large(limit: str) -> ErrorAnswer:
    """Return the answer 431."""
    return ErrorAnswer(
        status=431,
        message=f"The request's head is larger than {limit}",
        type="invalid_request_error",
        code="head_too_large",
    )


def malformed(message: str) -> ErrorAnswer:
    """Return the answer 400."""
    return ErrorAnswer(status=400, message=message, type="invalid_request_error")


def head_too_slow(seconds: float) -> ErrorAnswer:
    """Return the answer 408."""
    return ErrorAnswer(
        status=408,
        message=f"The request's head was not received within {seconds:g} s",
        type="invalid_request_error",
        code="request_timeout",
    )


def connections_exhausted(why: str) -> ErrorAnswer:
    """Return the answer 503."""
    return ErrorAnswer(
        status=503,
        message=f"The router is full: {why}",
        type="server_error",
        code="overloaded",
        headers={"Retry-After": "2", "Connection": "close"},
    )


class JoinedTransport(asyncio.Transport):
    """Transport of an answer's beginning: it holds the headers until more is written.

    It writes in the same turn of the loop. ``done`` is called with the inner transport, to which
    later writes may go.
    """

    def __init__(
        self, transport: asyncio.Transport, done: Callable[[asyncio.Transport], None]
    ) -> None:
        super().__init__()
        self._transport = transport
        self._done = done
        self._held: bytes | None = None
        self._begun = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._begun:
            self._begun, self._held = True, bytes(data)
            asyncio.get_running_loop().call_soon(self._release)
        elif self._held is not None:
            joined, self._held = self._held + data, None
            self._transport.write(joined)
            self._done(self._transport)
        else:
            self._transport.write(data)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def close(self) -> None:
        self._release()
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def _release(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            self._transport.write(held)
            self._done(self._transport)


class UnchunkedCycle(RequestResponseCycle):
    """Answer to HTTP/1.0, ended by the connection's close, or by a reset if it is incomplete."""

    is_measured = False

    async def send(self, message: ASGISendEvent) -> None:
        if message["type"] == "http.response.start":
            names = {name.lower() for name, _ in message.get("headers", [])}
            self.is_measured = b"content-length" in names
            self.chunked_encoding = None if self.is_measured else False
            if not self.is_measured:
                self._reset_at_close(True)
        elif message["type"] == "http.response.body" and not self.is_measured:
            self.expected_content_length = len(message.get("body", b""))
            if not message.get("more_body", False):
                await self.flow.drain()
                self._reset_at_close(False)
        await super().send(message)

    def would_seem_whole(self) -> bool:
        """Return whether an orderly close would make a part seem complete."""
        return self.response_started and not self.response_complete and not self.is_measured

    def _reset_at_close(self, is_reset: bool) -> None:
        raw = self.transport.get_extra_info("socket")
        if raw is not None and not self.transport.is_closing():
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", is_reset, 0))


class JoinedProtocol(HttpToolsProtocol):
    """Protocol for ``uvicorn.run(http=...)``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parser: RequestParser = RequestParser(self)  # type: ignore[assignment]

    def connection_lost(self, exc: Exception | None) -> None:
        self.parser.close()
        super().connection_lost(exc)

    def on_head_again(self) -> None:
        """Do nothing: the parts of this head come a second time."""

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        cycle = self.cycle
        if cycle is not None:
            if self.scope["http_version"] == "1.0":
                cycle.__class__ = UnchunkedCycle
            cycle.transport = JoinedTransport(
                cycle.transport, lambda transport: setattr(cycle, "transport", transport)
            )


HEARD_BEHIND = 8
"""Maximum pipelined requests up to which the client is read."""


class Outlet(asyncio.Transport):
    """Transport for uvicorn whose close is orderly."""

    def __init__(
        self, transport: asyncio.Transport, closing: Closing, end: Callable[[], None]
    ) -> None:
        super().__init__()
        self._transport = transport
        self._closing = closing
        self._end = end
        self.write = transport.write  # type: ignore[method-assign]  # no call more for a token

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def get_write_buffer_size(self) -> int:
        return self._transport.get_write_buffer_size()

    def pause_reading(self) -> None:
        if not self._closing.has_begun:
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()

    def is_closing(self) -> bool:
        return self._closing.is_over()

    def close(self) -> None:
        self._end()

    def abort(self) -> None:
        self._transport.abort()

    def ended(self) -> None:
        """Drop later writes."""
        self.write = _nowhere  # type: ignore[method-assign, assignment]

    def lost(self) -> None:
        self.ended()
        self._end = _nothing


class EndingProtocol(JoinedProtocol):
    """Connection that ends in order."""

    limits: ClassVar[ConnectionLimits] = ConnectionLimits()
    ending: ClassVar[dict[EndingProtocol, None]] = {}
    """Closing connections, the oldest first."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.cycles: deque[RequestResponseCycle] = deque()
        """Requests without a complete answer, the current one first."""
        self._is_stopping = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.closing = Closing(transport, self.limits.write_seconds)
        self._outlet = Outlet(transport, self.closing, self.end)
        super().connection_made(self._outlet)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closing.lost()
        self.ending.pop(self, None)
        self._outlet.lost()
        self._give_up_requests()
        super().connection_lost(exc)

    def eof_received(self) -> None:
        """Let the loop close after unsent bytes: the client has closed its half."""
        if self._breaks_off():
            self._outlet.abort()
        else:
            self.closing.watch()

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self.cycles.append(self.cycle)
        # uvicorn stops reading when a request waits after another, and notices no disconnect.
        waiting = [len(cycle.body) for cycle, _ in self.pipeline]
        if 0 < len(waiting) <= HEARD_BEHIND and sum(waiting) < HIGH_WATER_LIMIT:
            self.flow.resume_reading()

    def on_response_complete(self) -> None:
        if self.cycles:
            self.cycles.popleft()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Watch the progress of writes."""
        super().pause_writing()
        self.closing.watch()

    def resume_writing(self) -> None:
        """Stop the watch, unless the connection is closing."""
        if not self.closing.is_over():
            self.closing.disarm()
        super().resume_writing()

    def shutdown(self) -> None:
        """End with the server, without waiting for clients."""
        self._is_stopping = True
        super().shutdown()
        self.closing.hurry()

    def is_owed(self) -> bool:
        """Return whether the client has to send the rest of a request."""
        return False

    def end(self) -> None:
        """Write nothing more, and close after the client has received all.

        Close at once if a part would seem complete.
        """
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
        """Return whether only the client's close is awaited."""
        return self.closing.is_lingering()

    def _breaks_off(self) -> bool:
        """Return whether an orderly close would make a part of an answer seem complete."""
        answer = self.cycles[0] if self.cycles else None
        return isinstance(answer, UnchunkedCycle) and answer.would_seem_whole()

    def _give_up_requests(self) -> None:
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
