"""Limits of a connection before its request is authorized.

uvicorn reads a head of any length for any time. It keeps a connection whose client sends unwanted
bytes slowly, and a response that its client does not read. Here heads have a size, a count and a
deadline, and bodies a deadline and a limit on framing. Writes must progress, also those that are
left when a connection closes (``http_ends``). Connections are counted. What exceeds a limit is
answered with an error in OpenAI's shape if that is still possible, and the connection is closed.
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
from tandem.router.http.parser import framing_problem, host_of
from tandem.router.http.protocol import (
    ConnectionLimits,
    EndingProtocol,
    crowded,
    head_too_large,
    head_too_slow,
    malformed,
    written,
)

SPARE_CONNECTIONS = 32
"""Connections beyond the cap, for probes: too many connections are not a reason for a restart."""
PROBES = frozenset({"/health", "/live", "/ping", "/ready", "/metrics"})
MAX_PIPELINED = 16
MAX_FRAMING = 9
"""Bytes of chunk framing for each byte of a body: chunks of one byte need six."""
SPARE_CHUNKS = 1024
"""Chunks of any size that a body and those before it may have: each costs the loop a call."""
MIN_CHUNK = 64
"""Bytes that those beyond them have on average, or more."""
SMALL = 4 << 10
"""Unsent bytes with which a connection that ends counts no longer among its client's."""


class _Phase(Enum):
    IDLE = auto()
    HEAD = auto()
    BODY = auto()


class _OverLimitError(Exception):
    """Ends the parser's work on this connection."""


class GuardedProtocol(EndingProtocol):
    """Made for its limits by ``guarded``."""

    clients: ClassVar[Counter[str]] = Counter()
    """Open connections per address."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._phase = _Phase.IDLE
        self._raw = 0
        """Bytes of this phase."""
        self._seconds: float | None = None
        """That this phase may take, once nothing before it is being answered."""
        self._named = 0
        """Bytes of URL and headers (and trailers) of this message."""
        self._num_headers = 0
        self._body = 0
        self._num_parts = self._parts_bytes = 0
        """Counts over all bodies."""
        self._parts_before: deque[tuple[int, int]] = deque()
        """The two counts when a body began: of the current body, and before it of those whose
        answers are not complete."""
        self._deadline: asyncio.TimerHandle | None = None
        self._refusal: ErrorAnswer | None = None
        self._is_counted = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the connection in, or turn it away."""
        super().connection_made(transport)
        self._host = self.client[0] if self.client else ""
        self.clients[self._host] += 1
        self._is_counted = True
        self._enter(_Phase.HEAD, self.limits.head_seconds)
        limit = self.limits.connections_per_client
        if limit and self.clients[self._host] > limit:
            self._refuse(crowded("too many connections from this address"))
        elif len(self.connections) > self.limits.connections:
            self._squeeze_in()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the deadline and stop counting the connection."""
        self._disarm()
        self._uncount()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Count, parse, and arm the deadline of what is still open."""
        if self.closing.has_begun:
            self.closing.heard(len(data))
        if self.transport.is_closing():
            return
        if self._phase is _Phase.IDLE and not self.cycles:
            if not data.lstrip(b"\r\n"):  # begins no head, and the connection idles on
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
        """Begin a request."""
        super().on_message_begin()
        if self._phase is _Phase.IDLE:
            self._enter(_Phase.HEAD, self.limits.head_seconds)

    def on_url(self, url: bytes) -> None:
        """Count a part of the URL."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a field, of the head or of the trailers."""
        self._num_headers += 1
        if self._num_headers > self.limits.headers:
            self._give_up(head_too_large(f"{self.limits.headers} headers"))
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_head_again(self) -> None:
        """Reset the counts, since the parts of this head come a second time and count once."""
        super().on_head_again()
        self._named = self._num_headers = 0

    def on_headers_complete(self) -> None:
        """Begin the deadline of the body."""
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
        """End the request: nothing is due from the client until its next one."""
        super().on_message_complete()
        self._enter(_Phase.IDLE, None)
        self._named = self._num_headers = 0
        if self.cycle.response_complete and self.timeout_keep_alive_task is None:
            # The rest of a body that nobody wanted: uvicorn took the timer off for it.
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def on_response_complete(self) -> None:
        """Bound the rest of a request whose answer is complete, since the rest is not used. If a
        pipelined request follows, its deadline begins now."""
        super().on_response_complete()
        self._forget_parts()
        deadline = self._deadline
        if self._phase is _Phase.BODY and deadline is not None and self.cycle.response_complete:
            left = deadline.when() - self.loop.time()
            self._arm(min(left, self.limits.unwanted_seconds))
        elif deadline is None and not self.transport.is_closing():
            self._arm_if_due()

    def send_400_response(self, msg: str) -> None:
        """Answer an error of the parser, or the refusal that was raised through it."""
        self._refuse(self._refusal or malformed(msg))

    def is_owed(self) -> bool:
        """Return whether a request, or the first of a connection, has begun and has not ended."""
        return self._phase is not _Phase.IDLE

    def end(self) -> None:
        """Write nothing more, and close after the client has received what was written."""
        self._disarm()
        super().end()
        if self.transport.get_write_buffer_size() <= SMALL:
            self._uncount()

    @property
    def idle(self) -> bool:
        """Return whether the connection waits for its next request."""
        return self.timeout_keep_alive_task is not None and not self.transport.is_closing()

    def _squeeze_in(self) -> None:
        """Make room at the cap: abort lingering connections, or else close an idle one, or else
        answer probes only. An idle one may receive the rest of its answer, unless too many do so
        already."""
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
        """Remove the connection from its client's count."""
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
        """Arm the deadline, unless another request is answered: its client may not be read."""
        is_behind = self.cycles and (
            self._phase is not _Phase.BODY or self.cycles[0] is not self.cycle
        )
        if self._seconds is not None and not is_behind:
            self._arm(self._seconds)

    def _forget_parts(self) -> None:
        """Drop the counts of bodies whose answers are complete, except for the last one's."""
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
        if self.cycles:  # an endpoint has said itself that its body was too slow
            self.transport.abort()
        elif self._phase is _Phase.HEAD:
            self._refuse(head_too_slow(self.limits.head_seconds))
        else:  # nobody wanted the body
            self.end()

    def _count(self, num_bytes: int) -> None:
        self._named += num_bytes
        if self._named > self.limits.head_bytes:
            self._give_up(head_too_large(f"{self.limits.head_bytes} bytes"))

    def _give_up(self, answer: ErrorAnswer) -> None:
        """Raise within the parser, which passes the error on to ``send_400_response``."""
        self._refusal = answer
        raise _OverLimitError(answer.message)

    def _refuse(self, answer: ErrorAnswer) -> None:
        """Send the error, unless the client would take it for another request's answer; then
        end."""
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
    """Application for connections beyond the cap: it answers probes only."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in PROBES:
            await self._app(scope, receive, send)
        else:
            await send_error(scope, send, crowded("too many connections"))


def guarded(limits: ConnectionLimits) -> type[GuardedProtocol]:
    """Return the protocol of a server with these limits, for ``uvicorn.run(http=...)``."""
    return type(
        "GuardedProtocol",
        (GuardedProtocol,),
        {"limits": limits, "clients": Counter(), "ending": {}},
    )


def _mostly_framing() -> ErrorAnswer:
    return malformed("The body's chunks are mostly framing")
