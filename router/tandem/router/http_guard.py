"""What a connection may take of the router before anybody is known to be behind it.

uvicorn reads a head of any length for any time, keeps a connection for ever whose client trickles
bytes that nobody waits for, and a response that its client does not read. Here heads have a size, a
count and a deadline, bodies a deadline and little framing, writes must move, also those that are
left when a connection closes, and connections are counted. What goes beyond is answered in OpenAI's
shape where that can still be, and closed.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, ClassVar

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from tandem.router.http_protocol import JoinedProtocol
from tandem.router.middleware.answer import send_error
from tandem.router.openai.errors import ErrorAnswer

SPARE_CONNECTIONS = 32
"""Beyond the cap, for probes: a full house is no reason to be restarted."""
PROBES = frozenset({"/health", "/ready", "/metrics"})
MAX_PIPELINED = 16
MIN_DRAINED = 16 << 10
"""Bytes that a slow reader must take in each period in which a write waits for it."""
MAX_FRAMING = 9
"""Bytes of chunk framing for each byte of a body: chunks of one byte need six."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Of one connection, and of all."""

    head_bytes: int = 64 << 10
    headers: int = 128
    head_seconds: float = 10.0
    body_seconds: float = 60.0
    unwanted_seconds: float = 5.0
    """For the rest of a body whose request has its answer."""
    write_seconds: float = 30.0
    connections: int = 4096
    connections_per_client: int = 0
    """Per address; 0 is any number, as behind a proxy all have the same."""


class _Phase(Enum):
    IDLE = auto()
    HEAD = auto()
    BODY = auto()


class _OverLimitError(Exception):
    """Ends the parser's work on this connection."""


class GuardedProtocol(JoinedProtocol):
    """Made for its limits by ``guarded``."""

    limits: ClassVar[ConnectionLimits] = ConnectionLimits()
    clients: ClassVar[Counter[str]] = Counter()
    """Open connections per address."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.app = _Ended(self.app, self._watch_closing)
        self._phase = _Phase.IDLE
        self._raw = 0
        """Bytes of this phase."""
        self._named = 0
        """Bytes of URL and headers (and trailers) of this message."""
        self._num_headers = 0
        self._body = 0
        self._deadline: asyncio.TimerHandle | None = None
        self._drain: asyncio.TimerHandle | None = None
        self._unsent = 0
        self._refusal: ErrorAnswer | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the connection in, or turn it away."""
        super().connection_made(transport)
        host = self.client[0] if self.client else ""
        self.clients[host] += 1
        limit = self.limits.connections_per_client
        if limit and self.clients[host] > limit:
            self._refuse(_crowded("too many connections from this address"))
        elif len(self.connections) > self.limits.connections:
            self._squeeze_in()
        self._phase = _Phase.HEAD
        self._arm(self.limits.head_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing more is due."""
        self._disarm()
        self._stop_draining()
        host = self.client[0] if self.client else ""
        self.clients[host] -= 1
        if self.clients[host] <= 0:
            del self.clients[host]
        super().connection_lost(exc)
        del self.app  # leads back here: what is left goes with its last reference, not by a pass

    def data_received(self, data: bytes) -> None:
        """Count, parse, and count what is still open."""
        if self.transport.is_closing():
            return
        if self._phase is _Phase.IDLE:
            self._enter(_Phase.HEAD, self.limits.head_seconds)
        self._raw += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._phase is _Phase.HEAD and self._raw > self.limits.head_bytes:
            self._refuse(_head_too_large(f"{self.limits.head_bytes} bytes"))
        framing = self._raw - MAX_FRAMING * self._body
        if self._phase is _Phase.BODY and framing > self.limits.head_bytes + len(data):
            self._refuse(_bad_head("The body's chunks are mostly framing"))

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        if self._phase is _Phase.IDLE:
            self._enter(_Phase.HEAD, self.limits.head_seconds)

    def on_url(self, url: bytes) -> None:
        """A part of it."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """One more, of the head or of the trailers."""
        self._num_headers += 1
        if self._num_headers > self.limits.headers:
            self._give_up(_head_too_large(f"{self.limits.headers} headers"))
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Now the body has its time."""
        self._enter(_Phase.BODY, self.limits.body_seconds)
        super().on_headers_complete()
        if len(self.pipeline) > MAX_PIPELINED:
            self._give_up(_bad_head(f"More than {MAX_PIPELINED} requests wait on one connection"))

    def on_body(self, body: bytes) -> None:
        """A part of it."""
        self._body += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Nothing is due from the client until it begins again."""
        super().on_message_complete()
        self._enter(_Phase.IDLE, None)
        self._named = self._num_headers = 0
        if self.cycle.response_complete and self.timeout_keep_alive_task is None:
            # The rest of a body that nobody wanted: uvicorn took the timer off for it.
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def on_response_complete(self) -> None:
        """The answer is out; its request may not be in yet, and nobody waits for the rest."""
        super().on_response_complete()
        deadline = self._deadline
        if self._phase is _Phase.BODY and deadline is not None and self.cycle.response_complete:
            left = deadline.when() - self.loop.time()
            self._arm(min(left, self.limits.unwanted_seconds))

    def pause_writing(self) -> None:
        """The client takes less than it is sent."""
        super().pause_writing()
        self._stop_draining()
        self._watch_unsent()

    def resume_writing(self) -> None:
        """The client reads on; of a connection that closes, all of the rest."""
        if not self.transport.is_closing():
            self._stop_draining()
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        """No next request came."""
        super().timeout_keep_alive_handler()
        self._watch_closing()

    def shutdown(self) -> None:
        """The server ends."""
        super().shutdown()
        self._watch_closing()

    def send_400_response(self, msg: str) -> None:
        """The parser gave up, by itself or for us."""
        self._refuse(self._refusal or _bad_head(msg))

    @property
    def idle(self) -> bool:
        """Whether the connection waits for a next request."""
        return self.timeout_keep_alive_task is not None and not self.transport.is_closing()

    def _squeeze_in(self) -> None:
        """The house is full: whoever is idle goes; else only probes are answered. One that goes
        may take the rest of its answer with it, but not where too many do so already."""
        overflows = len(self.connections) > self.limits.connections + SPARE_CONNECTIONS
        for other in self.connections:
            if isinstance(other, GuardedProtocol) and other.idle:
                other.timeout_keep_alive_handler()
                if overflows:
                    other.transport.abort()
                return
        if overflows:
            self.transport.abort()
        self.app = _ProbesOnly(self.app)
        self.timeout_keep_alive = 1

    def _enter(self, phase: _Phase, seconds: float | None) -> None:
        self._phase = phase
        self._raw = self._body = 0
        self._disarm()
        if seconds is not None:
            self._arm(seconds)

    def _arm(self, seconds: float) -> None:
        self._disarm()
        self._deadline = self.loop.call_later(seconds, self._too_late)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_late(self) -> None:
        answering = self.cycle is not None and not self.cycle.response_complete
        if self._phase is _Phase.HEAD and not answering:
            self._refuse(_too_slow(self.limits.head_seconds))
        else:  # said by the endpoint itself that the body was too slow, or nobody wanted it
            self.transport.abort()

    def _count(self, num_bytes: int) -> None:
        self._named += num_bytes
        if self._named > self.limits.head_bytes:
            self._give_up(_head_too_large(f"{self.limits.head_bytes} bytes"))

    def _give_up(self, answer: ErrorAnswer) -> None:
        """From within the parser, which hands the error on to ``send_400_response``."""
        self._refusal = answer
        raise _OverLimitError(answer.message)

    def _refuse(self, answer: ErrorAnswer) -> None:
        if self.transport.is_closing():
            return
        body = answer.body
        lines = [STATUS_LINE[answer.status], b"content-type: application/json\r\n"]
        lines += [f"{name}: {value}\r\n".encode() for name, value in answer.headers.items()]
        lines += [b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body), body]
        if self.cycle is None or self.cycle.response_complete:
            self.transport.write(b"".join(lines))
        self.transport.close()
        self._watch_closing()

    def _watch_closing(self) -> None:
        """A connection closes when all is sent: a client that does not read would keep it."""
        if self._drain is None and self.transport.is_closing():
            self._watch_unsent()

    def _watch_unsent(self) -> None:
        self._unsent = self.transport.get_write_buffer_size()
        if self._unsent:
            self._drain = self.loop.call_later(self.limits.write_seconds, self._check_drained)

    def _check_drained(self) -> None:
        left = self.transport.get_write_buffer_size()
        if self._unsent - left < min(MIN_DRAINED, self._unsent):
            self.transport.abort()
            return
        self._unsent = left
        self._drain = self.loop.call_later(self.limits.write_seconds, self._check_drained)

    def _stop_draining(self) -> None:
        if self._drain is not None:
            self._drain.cancel()
            self._drain = None


class _Ended:
    """Tells when an answer has ended or was broken off, and uvicorn has done what follows."""

    def __init__(self, app: Any, then: Callable[[], None]) -> None:
        self._app = app
        self._then = then

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        finally:
            asyncio.get_running_loop().call_soon(self._then)


class _ProbesOnly:
    """For connections beyond the cap."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in PROBES:
            await self._app(scope, receive, send)
        else:
            await send_error(scope, send, _crowded("too many connections"))


def guarded(limits: ConnectionLimits) -> type[GuardedProtocol]:
    """The protocol of a server with these limits, for ``uvicorn.run(http=...)``."""
    return type("GuardedProtocol", (GuardedProtocol,), {"limits": limits, "clients": Counter()})


def _head_too_large(limit: str) -> ErrorAnswer:
    return ErrorAnswer(
        status=431,
        message=f"The request's head is larger than {limit}",
        type="invalid_request_error",
        code="head_too_large",
    )


def _bad_head(message: str) -> ErrorAnswer:
    return ErrorAnswer(status=400, message=message, type="invalid_request_error")


def _too_slow(seconds: float) -> ErrorAnswer:
    return ErrorAnswer(
        status=408,
        message=f"The request's head did not come within {seconds:g} s",
        type="invalid_request_error",
        code="request_timeout",
    )


def _crowded(why: str) -> ErrorAnswer:
    return ErrorAnswer(
        status=503,
        message=f"The router is full: {why}",
        type="server_error",
        code="overloaded",
        headers={"Retry-After": "2", "Connection": "close"},
    )
