"""One call: its caller, its messages, and its limits of memory and time."""

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
    """The call ends with a gRPC status."""

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
    """The client does not read its answer in time."""


class Intake:
    """Memory for received messages that are not parsed yet, divided between tenants.

    gRPC reports a message's size after it has arrived, so the maximum is reserved first.
    """

    def __init__(self, config: RouterConfig) -> None:
        self.held = HeldBytes(config.max_bodies_bytes)
        self.message_bytes = config.max_body_bytes
        self.receive_seconds = config.body_timeout
        self.write_seconds = config.write_timeout
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    async def reserve(self, call: Call) -> Holding:
        """Wait for memory for a message of the call's tenant, and reserve it."""
        tenant = call.tenant.id
        while True:
            holding = self.held.enter(tenant, call.make_room)
            if self.held.add(holding, self.message_bytes):
                self._wake()
                return holding
            self.held.let_go(holding)
            turn = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(tenant, deque()).append(turn)
            try:
                await asyncio.wait({turn}, timeout=STILL_SECONDS)
            finally:
                turn.cancel()

    def release(self, holding: Holding, num_bytes: int | None = None) -> None:
        self.held.came_whole(holding)
        self.held.let_go(holding, num_bytes)
        self._wake()

    def _wake(self) -> None:
        for tenant, turns in list(self._waiting.items()):
            while turns and turns[0].done():
                turns.popleft()
            if turns:
                turns.popleft().set_result(None)
            if not turns:
                del self._waiting[tenant]


class Call:
    """Call that the current task answers."""

    def __init__(self, context: Any, path: str, intake: Intake) -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None, "gRPC runs each call in a task"
        self.path = path
        self.metadata: dict[str, str | bytes] = dict(context.invocation_metadata())
        self.tenant = NO_KEYS
        """Tenant of the caller, once its key is checked."""
        self.arrived = loop.time()
        seconds = context.time_remaining()
        self.deadline: float | None = None if seconds is None else self.arrived + seconds
        """Client's deadline, as a time of the loop."""
        self.failure: RpcError | None = None
        """Status with which the router ends the call."""
        self.num_taken = 0
        """Bytes of the received message that is not parsed yet."""
        self._context = context
        self._intake = intake
        self._task = task
        self._loop = loop
        self._watch: asyncio.TimerHandle | None = None
        self._write_ends = math.inf
        """Deadline of the current write."""
        self._holding: Holding | None = None
        self._no_room: asyncio.Future[None] = loop.create_future()

    async def receive(self, *, only: bool = False) -> bytes | None:
        """Return the client's next message, or None after the last.

        Its bytes count until ``let_go``. Raises RpcError, with ``only`` also unless the call has
        one message.
        """
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
        # Never cancelled: gRPC would write the message to freed memory.
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
        if not self._no_room.done():
            self._no_room.set_result(None)

    def let_go(self) -> None:
        """Release the bytes of a parsed message."""
        self.num_taken = 0
        if self._holding is not None:
            self._intake.release(self._holding)
            self._holding = None

    async def write(self, message: bytes) -> None:
        """Send a message when the client has room. The call ends with NotRead if that is late."""
        if self._watch is None:
            self._watch = self._loop.call_later(self._intake.write_seconds, self._check_read)
            # A cancelled write would not count as the beginning of an answer.
            await self._context.send_initial_metadata(())
        seconds = self._intake.write_seconds * (1 + len(message) // MIN_DRAINED)
        self._write_ends = self._loop.time() + seconds
        await self._context.write(message)
        self._write_ends = math.inf

    def _check_read(self) -> None:
        """End the call if a write is late. One timer per call is cheaper than one per token."""
        now = self._loop.time()
        if now >= self._write_ends:
            words = "the client does not read its answer"
            self.end(NotRead(grpc.StatusCode.DEADLINE_EXCEEDED, words))
        else:
            when = min(self._write_ends, now + self._intake.write_seconds)
            self._watch = self._loop.call_at(when, self._check_read)

    def close(self) -> None:
        """Release what the call holds. Only its status is sent after this."""
        self.let_go()
        if self._watch is not None:
            self._watch.cancel()

    def end(self, failure: RpcError) -> None:
        self.failure = failure
        self._task.cancel()

    async def abort(self, failure: RpcError) -> None:
        with suppress(grpc.aio.InternalError):
            await self._context.abort(failure.code, str(failure), failure.metadata)


class Calls:
    """Running calls by tenant and id."""

    def __init__(self) -> None:
        self._running: dict[tuple[str, str], list[Call]] = {}

    @contextmanager
    def running(self, request_id: str, call: Call) -> Iterator[None]:
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
        """End the calls of an id of ``by``'s tenant; return their number."""
        calls = list(self._running.get((by.tenant.id, request_id), ()))
        for call in calls:
            call.end(RpcError(grpc.StatusCode.ABORTED, f"the call {request_id} was aborted"))
        return len(calls)
