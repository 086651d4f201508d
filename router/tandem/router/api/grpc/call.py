"""One call: its caller, its messages, and the memory and the time that they may take."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import grpc

from tandem.protocol.errors import TandemError
from tandem.router.config import RouterConfig
from tandem.router.http.closing import MIN_DRAINED
from tandem.router.http.errors import ErrorAnswer, answer_of
from tandem.router.http.held_bytes import STILL_SECONDS, HeldBytes, Holding
from tandem.router.tenant import NO_KEYS

logger = logging.getLogger(__name__)
Metadata = tuple[tuple[str, str], ...]


class RpcError(Exception):
    """A call that ends with a status of gRPC's own."""

    def __init__(self, code: grpc.StatusCode, words: str, metadata: Metadata = ()) -> None:
        super().__init__(words)
        self.code = code
        self.metadata = metadata


_STATUSES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    500: grpc.StatusCode.INTERNAL,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}


def failure_of(error: Exception) -> RpcError:
    """Return the status of a call that an exception ended."""
    if isinstance(error, RpcError):
        return error
    if isinstance(error, TimeoutError):
        return RpcError(grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline has passed")
    if not isinstance(error, TandemError):
        logger.error("a gRPC call failed", exc_info=error)
    answer = answer_of(error)
    code = _STATUSES.get(answer.status, grpc.StatusCode.UNKNOWN)
    return RpcError(code, answer.message, _metadata_of(answer))


def _metadata_of(answer: ErrorAnswer) -> Metadata:
    """Return the field and the code of an error, and the time to retry, if it has them."""
    found = {
        "tandem-error-param": answer.param,
        "tandem-error-code": answer.code,
        "retry-after": answer.headers.get("Retry-After"),
    }
    return tuple((key, _ascii(value)) for key, value in found.items() if value)


def _ascii(text: str) -> str:
    """Return a value that metadata may carry: a client ends the connection at a line break."""
    return text.encode("unicode_escape").decode().strip()


RETRY = (("retry-after", "2"),)


class NotRead(RpcError):
    """The client does not read its answer."""


class Intake:
    """Memory for messages that are received and not understood yet, divided between tenants.

    gRPC does not report a message's size before all of it is there. So the size of the largest is
    reserved first, and a call without a reservation receives no more than its first window.
    """

    def __init__(self, config: RouterConfig) -> None:
        self.held = HeldBytes(config.max_bodies_bytes)
        self.message_bytes = config.max_body_bytes
        self.receive_seconds = config.body_timeout
        self.write_seconds = config.write_timeout
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    async def reserve(self, call: Call) -> Holding:
        """Wait until there is memory for a message of the call's tenant, and reserve it."""
        tenant = call.tenant.id
        while True:
            holding = self.held.enter(tenant, call.make_room)
            if self.held.add(holding, self.message_bytes):
                self._wake()
                return holding
            self.held.let_go(holding)
            turn = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(tenant, deque()).append(turn)
            try:  # a call of the tenant may stand still after this time
                await asyncio.wait({turn}, timeout=STILL_SECONDS)
            finally:
                turn.cancel()

    def release(self, holding: Holding, num_bytes: int | None = None) -> None:
        """Give back a part of a reservation, or all of it."""
        self.held.came_whole(holding)
        self.held.let_go(holding, num_bytes)
        self._wake()

    def _wake(self) -> None:
        """Let the first waiting call of each tenant try again."""
        for tenant, turns in list(self._waiting.items()):
            while turns and turns[0].done():
                turns.popleft()
            if turns:
                turns.popleft().set_result(None)
            if not turns:
                del self._waiting[tenant]


class Call:
    """A call that runs in the current task."""

    def __init__(self, context: Any, path: str, intake: Intake) -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None, "gRPC runs each call in a task"
        self.path = path
        self.metadata: dict[str, str | bytes] = dict(context.invocation_metadata())
        self.tenant = NO_KEYS
        """The caller's tenant, after the check of its key."""
        self.arrived = loop.time()
        seconds = context.time_remaining()
        self.deadline: float | None = None if seconds is None else self.arrived + seconds
        """The client's deadline, as a time of the loop."""
        self.failure: RpcError | None = None
        """The status with which the router ends the call."""
        self.num_taken = 0
        """Bytes of the message that was received and is not understood yet."""
        self._context = context
        self._intake = intake
        self._task = task
        self._loop = loop
        self._watch: asyncio.TimerHandle | None = None
        self._write_ends = math.inf
        """The time at which the write under way is late."""
        self._holding: Holding | None = None
        self._no_room: asyncio.Future[None] = loop.create_future()

    async def receive(self, *, only: bool = False) -> bytes | None:
        """Return the client's next message, or None after the last. Its bytes are held until
        ``let_go``. Raises RpcError, with ``only`` also unless it is the one message of the call."""
        intake = self._intake
        try:
            async with asyncio.timeout(intake.receive_seconds):
                self._holding = await intake.reserve(self)
                message = await self._read()
                is_alone = message is not None and (not only or await self._read() is None)
        except TimeoutError:
            words = f"the message did not arrive within {intake.receive_seconds:g} s"
            raise RpcError(grpc.StatusCode.DEADLINE_EXCEEDED, words, RETRY) from None
        if only and not is_alone:
            raise RpcError(grpc.StatusCode.INVALID_ARGUMENT, "the method takes one message")
        self.num_taken = len(message or b"")
        intake.release(self._holding, intake.message_bytes - self.num_taken)
        return message

    async def _read(self) -> bytes | None:
        # Never cancelled: gRPC would write the message to memory that is freed by then.
        reading: asyncio.Future[Any] = asyncio.ensure_future(self._context.read())
        reading.add_done_callback(lambda read: read.cancelled() or read.exception())
        await asyncio.wait({reading, self._no_room}, return_when=asyncio.FIRST_COMPLETED)
        if self._no_room.done():
            assert self._holding is not None, "a call without a reservation makes no room"
            words = f"the router is full: {self._intake.held.why_full(self._holding)}"
            raise RpcError(grpc.StatusCode.UNAVAILABLE, words, RETRY)
        message = reading.result()
        return None if message is grpc.aio.EOF else message

    def make_room(self) -> None:
        """End the call if it still receives: another one of its tenant needs the memory."""
        if not self._no_room.done():
            self._no_room.set_result(None)

    def let_go(self) -> None:
        """Hold the bytes of the message no more: it is understood."""
        self.num_taken = 0
        if self._holding is not None:
            self._intake.release(self._holding)
            self._holding = None

    async def write(self, message: bytes) -> None:
        """Send a message, as soon as the client has room for it. The call ends with NotRead if that
        takes too long."""
        if self._watch is None:
            self._watch = self._loop.call_later(self._intake.write_seconds, self._check_read)
            # Sent alone: a write that is cancelled would not count as the begin of an answer.
            await self._context.send_initial_metadata(())
        seconds = self._intake.write_seconds * (1 + len(message) // MIN_DRAINED)
        self._write_ends = self._loop.time() + seconds
        await self._context.write(message)
        self._write_ends = math.inf

    def _check_read(self) -> None:
        """End the call if a write is late. One timer for a call: one for each token costs more."""
        now = self._loop.time()
        if now >= self._write_ends:
            words = "the client does not read its answer"
            self.end(NotRead(grpc.StatusCode.DEADLINE_EXCEEDED, words))
        else:
            when = min(self._write_ends, now + self._intake.write_seconds)
            self._watch = self._loop.call_at(when, self._check_read)

    def close(self) -> None:
        """Release what the call holds. It sends nothing more but its status."""
        self.let_go()
        if self._watch is not None:
            self._watch.cancel()

    def end(self, failure: RpcError) -> None:
        """End the call with a status, wherever it is."""
        self.failure = failure
        self._task.cancel()

    async def abort(self, failure: RpcError) -> None:
        """Send the status of a call that failed."""
        with suppress(grpc.aio.InternalError):  # the client is gone
            await self._context.abort(failure.code, str(failure), failure.metadata)


class Calls:
    """Calls that run, by tenant and id: a call of one tenant ends none of another's."""

    def __init__(self) -> None:
        self._running: dict[tuple[str, str], list[Call]] = {}

    @contextmanager
    def running(self, request_id: str, call: Call) -> Iterator[None]:
        """Register a call while it runs."""
        name = (call.tenant.id, request_id)
        calls = self._running.setdefault(name, [])
        calls.append(call)
        try:
            yield
        finally:
            calls.remove(call)
            if not calls:
                del self._running[name]

    def abort(self, request_id: str, by: Call) -> int:
        """End all calls of an id and of the tenant of the call ``by``; return their number."""
        calls = list(self._running.get((by.tenant.id, request_id), ()))
        for call in calls:
            call.end(RpcError(grpc.StatusCode.ABORTED, f"the call {request_id} was aborted"))
        return len(calls)
