"""Bytes of requests in memory until they are parsed, by tenant.

A tenant may hold twice what is free. An arriving request that stalls ends in favour of another of
its tenant.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable

from starlette.types import (
    ASGIApp,
    Message,
    Receive,
    Scope,
    Send,
)

from tandem.router.dispatch.admission import Turns
from tandem.router.http.errors import ErrorAnswer, HttpProblem, body_too_large
from tandem.router.http.middleware import send_error
from tandem.router.tenant import tenant_id
from tandem.tracing.recording import current

STILL_SECONDS = 2.0
"""Seconds without ``PROGRESS_BYTES`` after which a request may be ended."""
PROGRESS_BYTES = 4_096
FREE_FACTOR = 2
"""Ratio of a tenant's maximum to the free bytes."""


class HeldBytes:
    """Requests of one protocol. Used in the loop's thread."""

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.most = most
        self.num_bytes = 0
        """Bytes of all tenants."""
        self._clock = clock
        self._by_tenant: Counter[str] = Counter()
        self._coming: dict[Holding, Callable[[], None]] = {}
        """Callbacks that end arriving requests, in the order of their last progress."""

    def enter(self, tenant: str, end: Callable[[], None]) -> Holding:
        """Return the holding of a new request; ``end`` is called if it has to make room."""
        holding = Holding(tenant, self._clock())
        self._coming[holding] = end
        return holding

    def add(self, holding: Holding, num_bytes: int) -> bool:
        """Hold received bytes; return whether there was room. They count in either case."""
        self._count(holding, num_bytes)
        moves = holding.progressed(num_bytes, self._clock())
        if moves and holding in self._coming:
            self._coming[holding] = self._coming.pop(holding)
        if not self._has_room(holding):
            self._make_room(holding)
        return self._has_room(holding)

    def came_whole(self, holding: Holding) -> None:
        """Note that the request is complete: it is not ended for another."""
        self._coming.pop(holding, None)

    def let_go(self, holding: Holding, num_bytes: int | None = None) -> None:
        """Release bytes of a request, by default all."""
        if num_bytes is None:
            num_bytes = holding.num_bytes
            self._coming.pop(holding, None)
        self._count(holding, -num_bytes)

    def why_full(self, holding: Holding) -> str:
        own = self._by_tenant[holding.tenant]
        return (
            f"requests that are being read hold {self.num_bytes} bytes, those of this client "
            f"{own}; at most {self.most} are held for all"
        )

    def seconds_still(self, holding: Holding) -> float:
        """Return the seconds since a request's progress."""
        return self._clock() - holding.progress_at

    def _count(self, holding: Holding, num_bytes: int) -> None:
        holding.num_bytes += num_bytes
        self.num_bytes += num_bytes
        self._by_tenant[holding.tenant] += num_bytes
        if not self._by_tenant[holding.tenant]:
            del self._by_tenant[holding.tenant]

    def _has_room(self, holding: Holding) -> bool:
        """Return whether received bytes may stay; a single request always may."""
        if holding.num_bytes == self.num_bytes:
            return True
        free = self.most - self.num_bytes
        if not holding.tenant:
            return free >= 0
        return self._by_tenant[holding.tenant] <= FREE_FACTOR * max(free, 0)

    def _make_room(self, holding: Holding) -> None:
        """End stalled requests of the same tenant, until there is room."""
        for each, end in list(self._coming.items()):
            if self.seconds_still(each) < STILL_SECONDS or self._has_room(holding):
                return
            if each is not holding and each.tenant == holding.tenant and each.num_bytes:
                self.let_go(each)
                end()


class Holding:
    """Bytes of one request."""

    __slots__ = ("_fresh", "num_bytes", "progress_at", "tenant")

    def __init__(self, tenant: str, now: float) -> None:
        self.tenant = tenant
        self.num_bytes = 0
        self.progress_at = now
        """Time of its last ``PROGRESS_BYTES``."""
        self._fresh = 0

    def progressed(self, num_bytes: int, now: float) -> bool:
        """Count received bytes; return whether they are progress."""
        self._fresh += num_bytes
        if self._fresh < PROGRESS_BYTES:
            return False
        self._fresh, self.progress_at = 0, now
        return True


STALL_SECONDS = 15.0
"""Seconds without ``PROGRESS_BYTES`` after which a body is given up."""

PART_BYTES = 16_384
"""Bytes of a part that takes a turn."""


class BodyLimit:
    """Bound on request bodies, by their declared length or while they grow.

    A body counts until its answer begins.
    """

    def __init__(
        self,
        app: ASGIApp,
        max_body_bytes: int,
        max_bodies_bytes: int,
        turns: Turns,
        stall_seconds: float = STALL_SECONDS,
    ) -> None:
        """``turns`` are shared with other work of the loop."""
        self._app = app
        self._limit = max_body_bytes
        self._held = HeldBytes(max_bodies_bytes)
        self._turns = turns
        self._stall_seconds = stall_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        recording = current()
        if recording is not None:
            recording.tenant = tenant_id()  # outer layers have checked its key
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if declared.isdigit() and int(declared[:20]) > self._limit:
            await send_error(scope, send, body_too_large(self._limit))
            return
        upload = _Upload(self._held, receive, self._limit, self._turns, self._stall_seconds)

        async def answering(message: Message) -> None:
            upload.let_go()
            await send(message)

        try:
            await self._app(scope, upload.receive, answering)
        finally:
            upload.let_go()


class _Upload:
    """Received part of one request's body."""

    def __init__(
        self, held: HeldBytes, source: Receive, limit: int, turns: Turns, seconds: float
    ) -> None:
        self._held = held
        self._tenant = tenant_id()
        self._holding: Holding | None = None
        """Reservation of the body's bytes, from the first read on."""
        self._source = source
        self._limit = limit
        self._turns = turns
        self._stall_seconds = seconds
        self._is_whole = False
        self._made_room = False
        self._timer: asyncio.Timeout | None = None
        """Deadline of the next part."""

    def let_go(self) -> None:
        """Release all bytes. May be called twice."""
        if self._holding is not None:
            self._held.let_go(self._holding)

    async def receive(self) -> Message:
        """Return the next part. Raises HttpProblem."""
        if self._is_whole:
            return await self._source()
        if self._holding is None:
            self._holding = self._held.enter(self._tenant, self._end)
        try:
            message = await self._next(self._holding)
        except BaseException:
            self.let_go()
            raise
        if not message.get("more_body", False):
            self._is_whole = True
            if self._holding is not None:
                self._held.came_whole(self._holding)
        return message

    async def _next(self, holding: Holding) -> Message:
        held, seconds = self._held, self._stall_seconds
        try:
            async with asyncio.timeout(seconds) as self._timer:
                message = await self._source()
        except TimeoutError:
            answer = self._too_many(holding) if self._made_room else self._too_still()
            raise HttpProblem(answer) from None
        finally:
            self._timer = None
        has_room = held.add(holding, len(message.get("body", b"")))
        if holding.num_bytes > self._limit:
            raise HttpProblem(body_too_large(self._limit))
        if self._made_room or not has_room:
            raise HttpProblem(self._too_many(holding))
        if len(message.get("body", b"")) >= PART_BYTES:
            await self._turns.take()  # fast uploads leave rounds of the loop to others
        if message.get("more_body", False) and held.seconds_still(holding) >= seconds:
            raise HttpProblem(self._too_still())
        return message

    def _end(self) -> None:
        """End the request: another body needs its bytes."""
        self._made_room = True
        if self._timer is not None:
            self._timer.reschedule(asyncio.get_running_loop().time())

    def _too_many(self, holding: Holding) -> ErrorAnswer:
        return ErrorAnswer(
            status=503,
            message=f"The router is full: {self._held.why_full(holding)}",
            type="server_error",
            code="overloaded",
            headers={"Retry-After": "2", "Connection": "close"},
        )

    def _too_still(self) -> ErrorAnswer:
        message = (
            f"Less than {PROGRESS_BYTES} bytes of the body were received in "
            f"{self._stall_seconds:g} s; send it without pauses"
        )
        return ErrorAnswer(
            status=408,
            message=message,
            type="invalid_request_error",
            code="request_timeout",
            headers={"Retry-After": "1", "Connection": "close"},
        )
