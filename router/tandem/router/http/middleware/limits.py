"""Refuses bodies above the limit before, or while, they are read; and all of them together."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tandem.router.dispatch.admission import Turns
from tandem.router.http.errors import ErrorAnswer, HttpProblem, body_too_large
from tandem.router.http.held_bytes import PROGRESS_BYTES, HeldBytes, Holding
from tandem.router.http.middleware.errors import send_error
from tandem.router.tenant import tenant_id
from tandem.tracing.recording import current

STALL_SECONDS = 15.0
"""A body of which less than ``PROGRESS_BYTES`` comes in this time is given up."""

PART_BYTES = 16_384
"""A part of a body that has so many takes a turn."""


class BodyLimit:
    """Bound on request bodies: a declared length is refused at once, an undeclared one when it has
    grown too large.

    A body counts among all until its answer begins: by then it was parsed and released.
    """

    def __init__(
        self,
        app: ASGIApp,
        max_body_bytes: int,
        max_bodies_bytes: int,
        turns: Turns,
        stall_seconds: float = STALL_SECONDS,
    ) -> None:
        """``turns`` are shared with whatever else begins something in the loop."""
        self._app = app
        self._limit = max_body_bytes
        self._held = HeldBytes(max_bodies_bytes)
        self._turns = turns
        self._stall_seconds = stall_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run as an ASGI application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        recording = current()
        if recording is not None:
            recording.tenant = tenant_id()  # the layers around this one have checked its key
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
    """The body of one request, as far as it has come."""

    def __init__(
        self, held: HeldBytes, source: Receive, limit: int, turns: Turns, seconds: float
    ) -> None:
        self._held = held
        self._tenant = tenant_id()
        self._holding: Holding | None = None
        """Reservation of the body's bytes, from the application's first read on."""
        self._source = source
        self._limit = limit
        self._turns = turns
        self._stall_seconds = seconds
        self._is_whole = False
        self._made_room = False
        self._timer: asyncio.Timeout | None = None
        """While a part of it is waited for."""

    def let_go(self) -> None:
        """Hold nothing of it any more. May be called twice."""
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
            await self._turns.take()  # uploads at full speed leave rounds of the loop to others
        if message.get("more_body", False) and held.seconds_still(holding) >= seconds:
            raise HttpProblem(self._too_still())
        return message

    def _end(self) -> None:
        """End the request, which stalls while another body needs its bytes."""
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
