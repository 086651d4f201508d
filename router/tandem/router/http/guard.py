"""Limits of a connection before its request is authorized, which uvicorn lacks.

Heads have a size, a count and a deadline, bodies a deadline and a limit on framing, and writes must
progress. Connections are counted. Beyond a limit, the connection gets an error if possible, and is
closed.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from enum import Enum, auto
from itertools import islice
from typing import Any, ClassVar

from starlette.types import ASGIApp, Receive, Scope, Send

from tandem.router.http.errors import ErrorAnswer
from tandem.router.http.middleware import send_error
from tandem.router.http.protocol import (
    ConnectionLimits,
    EndingProtocol,
    connections_exhausted,
    framing_problem,
    head_too_large,
    head_too_slow,
    host_of,
    malformed,
    written,
)

SPARE_CONNECTIONS = 32
"""Connections beyond the cap, for probes."""
PROBES = frozenset({"/health", "/live", "/ping", "/ready", "/metrics"})
MAX_PIPELINED = 16
MAX_FRAMING = 9
"""Maximum bytes of chunk framing per byte of a body."""
SPARE_CHUNKS = 1024
"""Chunks of any size in a body and those before it."""
MIN_CHUNK = 64
"""Minimum mean bytes of further chunks."""
SMALL = 4 << 10
"""Unsent bytes below which a closing connection does not count for its client."""


class _Phase(Enum):
    IDLE = auto()
    HEAD = auto()
    BODY = auto()


class _OverLimitError(Exception):
    """Ends the parser's work on this connection."""


class GuardedProtocol(EndingProtocol):
    """Connection with limits; made by ``guarded``."""

    clients: ClassVar[Counter[str]] = Counter()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._phase = _Phase.IDLE
        self._raw = 0
        self._seconds: float | None = None
        """Seconds of this phase, if no request before it is being answered."""
        self._named = 0
        """Bytes of URL, headers and trailers of this message."""
        self._num_headers = 0
        self._body = 0
        self._num_parts = self._parts_bytes = 0
        """Counts over all bodies."""
        self._parts_before: deque[tuple[int, int]] = deque()
        """Both counts at the beginning of the current body and of those with incomplete answers."""
        self._deadline: asyncio.TimerHandle | None = None
        self._refusal: ErrorAnswer | None = None
        self._is_counted = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._host = self.client[0] if self.client else ""
        self.clients[self._host] += 1
        self._is_counted = True
        self._enter(_Phase.HEAD, self.limits.head_seconds)
        limit = self.limits.connections_per_client
        if limit and self.clients[self._host] > limit:
            self._refuse(connections_exhausted("too many connections from this address"))
        elif len(self.connections) > self.limits.connections:
            self._squeeze_in()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the deadline, and stop counting the connection."""
        self._disarm()
        self._uncount()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.closing.has_begun:
            self.closing.count_read(len(data))
        if self.transport.is_closing():
            return
        if self._phase is _Phase.IDLE and not self.cycles:
            if not data.lstrip(b"\r\n"):  # begins no head: the connection stays idle
                return
            self._enter(_Phase.HEAD, self.limits.head_seconds)
        self._raw += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._phase is _Phase.HEAD and self._raw > self.limits.head_bytes:
            self._refuse(head_too_large(f"{self.limits.head_bytes} bytes"))
        framing = self._raw - MAX_FRAMING * self._body
        if self._phase is _Phase.BODY and framing > self.limits.head_bytes + len(data):
            self._refuse(_mostly_framing())

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._phase is _Phase.IDLE:
            self._enter(_Phase.HEAD, self.limits.head_seconds)

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        if self._num_headers > self.limits.headers:
            self._give_up(head_too_large(f"{self.limits.headers} headers"))
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_head_again(self) -> None:
        """Reset the counts: the parts of this head come again."""
        super().on_head_again()
        self._named = self._num_headers = 0

    def on_headers_complete(self) -> None:
        problem = framing_problem(self.parser.get_http_version(), self.headers)
        if problem is not None:
            self._give_up(malformed(problem))
        host = host_of(self.url)
        if host is not None:
            others = [each for each in self.headers if each[0] != b"host"]
            self.headers[:] = [(b"host", host), *others]
        super().on_headers_complete()
        self._enter(_Phase.BODY, self.limits.body_seconds)
        self._parts_before.append((self._num_parts, self._parts_bytes))
        self._forget_parts()
        if len(self.pipeline) > MAX_PIPELINED:
            self._give_up(
                malformed(f"More than {MAX_PIPELINED} requests are queued on one connection")
            )

    def on_body(self, body: bytes) -> None:
        """Count a part of the body: a chunk, or what a read returned of one."""
        self._body += len(body)
        self._num_parts += 1
        self._parts_bytes += len(body)
        num, size = self._parts_before[0]
        if self._num_parts - num > SPARE_CHUNKS + (self._parts_bytes - size) // MIN_CHUNK:
            self._give_up(_mostly_framing())
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End the request: its client may wait."""
        super().on_message_complete()
        self._enter(_Phase.IDLE, None)
        self._named = self._num_headers = 0
        if self.cycle.response_complete and self.timeout_keep_alive_task is None:
            # The rest of an unread body: uvicorn cancelled the timer for it.
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def on_response_complete(self) -> None:
        """Bound the rest of a request whose answer is complete.

        If a pipelined request follows, its deadline begins now.
        """
        super().on_response_complete()
        self._forget_parts()
        deadline = self._deadline
        if self._phase is _Phase.BODY and deadline is not None and self.cycle.response_complete:
            left = deadline.when() - self.loop.time()
            self._arm(min(left, self.limits.unwanted_seconds))
        elif deadline is None and not self.transport.is_closing():
            self._arm_if_due()

    def send_400_response(self, msg: str) -> None:
        """Answer an error of the parser, or the refusal raised through it."""
        self._refuse(self._refusal or malformed(msg))

    def is_owed(self) -> bool:
        """Return whether a request is incomplete, or the first one is awaited."""
        return self._phase is not _Phase.IDLE

    def end(self) -> None:
        """Write nothing more, and close after the client has received all."""
        self._disarm()
        super().end()
        if self.transport.get_write_buffer_size() <= SMALL:
            self._uncount()

    @property
    def idle(self) -> bool:
        """Return whether the connection waits for its next request."""
        return self.timeout_keep_alive_task is not None and not self.transport.is_closing()

    def _squeeze_in(self) -> None:
        """Make room at the cap: abort closing connections, else close an idle one, else answer
        probes only.
        """
        others = self.connections
        over = len(others) - self.limits.connections
        gone = list(
            islice((each for each in self.ending if each.is_lingering() and each in others), over)
        )
        for each in gone:
            each.transport.abort()
        if len(gone) == over:
            return
        overflows = over - len(gone) > SPARE_CONNECTIONS
        for other in others:
            if isinstance(other, GuardedProtocol) and other.idle:
                other.timeout_keep_alive_handler()
                if overflows:
                    other.transport.abort()
                return
        if overflows:
            self.transport.abort()
        self.app = _ProbesOnly(self.app)
        self.timeout_keep_alive = 1

    def _uncount(self) -> None:
        """Stop counting the connection for its client."""
        if not self._is_counted:
            return
        self._is_counted = False
        self.clients[self._host] -= 1
        if self.clients[self._host] <= 0:
            del self.clients[self._host]

    def _enter(self, phase: _Phase, seconds: float | None) -> None:
        self._phase = phase
        self._raw = self._body = 0
        self._disarm()
        self._seconds = seconds
        self._arm_if_due()

    def _arm_if_due(self) -> None:
        """Arm the deadline, unless another request is being answered."""
        is_behind = self.cycles and (
            self._phase is not _Phase.BODY or self.cycles[0] is not self.cycle
        )
        if self._seconds is not None and not is_behind:
            self._arm(self._seconds)

    def _forget_parts(self) -> None:
        """Drop the counts of bodies with complete answers, except the last."""
        while len(self._parts_before) > max(1, len(self.cycles)):
            self._parts_before.popleft()

    def _arm(self, seconds: float) -> None:
        self._disarm()
        self._deadline = self.loop.call_later(seconds, self._too_late)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_late(self) -> None:
        if self.cycles:  # an endpoint has reported that its body was too slow
            self.transport.abort()
        elif self._phase is _Phase.HEAD:
            self._refuse(head_too_slow(self.limits.head_seconds))
        else:  # the body is not read
            self.end()

    def _count(self, num_bytes: int) -> None:
        self._named += num_bytes
        if self._named > self.limits.head_bytes:
            self._give_up(head_too_large(f"{self.limits.head_bytes} bytes"))

    def _give_up(self, answer: ErrorAnswer) -> None:
        """Raise within the parser, which calls ``send_400_response``."""
        self._refusal = answer
        raise _OverLimitError(answer.message)

    def _refuse(self, answer: ErrorAnswer) -> None:
        """Send the error, unless it would seem another request's answer; then end."""
        if self.transport.is_closing():
            return
        if self._phase is _Phase.BODY:
            is_free = list(self.cycles) == [self.cycle] and not self.cycle.response_started
        else:
            is_free = not self.cycles
        if is_free:
            self.transport.write(written(answer))
        self.end()


class _ProbesOnly:
    """Application for connections beyond the cap."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in PROBES:
            await self._app(scope, receive, send)
        else:
            await send_error(scope, send, connections_exhausted("too many connections"))


def guarded(limits: ConnectionLimits) -> type[GuardedProtocol]:
    """Return the protocol for ``uvicorn.run(http=...)``."""
    return type(
        "GuardedProtocol",
        (GuardedProtocol,),
        {"limits": limits, "clients": Counter(), "ending": {}},
    )


def _mostly_framing() -> ErrorAnswer:
    return malformed("The body's chunks are mostly framing")
