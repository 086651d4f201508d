"""Engine in this process, stepped by its own thread: for offline batches and tests.

The caller's event loop never blocks. Several loops may share a client.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future

from tandem.engine.core.engine_core import EngineCore, StepOutputs
from tandem.engine.scheduler.admission import open_choices
from tandem.protocol.card import ModelCard
from tandem.protocol.commands import Command, Reply, seconds_for
from tandem.protocol.context import ORDINARY, RequestContext
from tandem.protocol.errors import (
    FailCause,
    InvalidParameter,
    RequestFailed,
    RequestRefused,
    TandemError,
)
from tandem.protocol.ids import RequestKey
from tandem.protocol.outputs import EngineOutput, Failed
from tandem.protocol.requests import EngineCoreRequest

logger = logging.getLogger(__name__)

PARKED_SECONDS = 0.05
"""Interval of polling while requests wait for events that do not wake the thread, in seconds."""
CALL_SECONDS = 60.0
"""Deadline of a command; a step may precede it."""
JOIN_SECONDS = 30.0

Item = EngineOutput | TandemError


class _Stream:
    """Queue of outputs to a caller's loop; cheaper to make than asyncio.Queue."""

    __slots__ = ("_items", "_waiting", "loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._items: deque[Item] = deque()
        self._waiting: asyncio.Future[None] | None = None

    def put(self, item: Item) -> None:
        """Add an item. Call it in the loop."""
        self._items.append(item)
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def get(self) -> Item:
        while not self._items:
            self._waiting = self.loop.create_future()
            await self._waiting
        return self._items.popleft()


class InprocClient:
    """``EngineCoreClient`` over an EngineCore of this process, which it owns."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._card = core.card()
        core.wake = self.wake
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._streams: dict[RequestKey, _Stream] = {}
        """Used by the engine's thread only."""
        self._closing = threading.Event()
        self._ended: RequestFailed | None = None
        self._lock = threading.Lock()
        """Lock of ``_ended`` and of posts: a thread that has ended receives none."""
        self._thread = threading.Thread(target=self._run, name="engine-core", daemon=True)
        self._thread.start()

    async def stream(
        self, request: EngineCoreRequest, context: RequestContext = ORDINARY
    ) -> AsyncGenerator[EngineOutput]:
        if context.route is not None:
            raise InvalidParameter("route", context.route, "None: there is only one engine")
        card = self._card
        if request.pooling is None:  # pooling allows one of the engine's parameters only
            request.params.verify().verify_vocabulary(card.vocab_size, card.max_logprobs)
        stream = _Stream(asyncio.get_running_loop())
        left = set(open_choices(request))
        self._post(lambda: self._submit(request, stream))
        held, cut = True, False
        try:
            while left:
                item = await stream.get()
                if isinstance(item, TandemError):
                    held = False
                    raise item
                if item.finish is not None:
                    left.discard(item.choice)
                    held = cut or bool(left)
                yield item
                if context.ended:
                    cut = held = True  # until the thread reports otherwise
                    left.difference_update(context.ended)
                    self._end_choices(request.key, tuple(context.ended))
                    context.ended.clear()
        finally:
            if held:
                self._abandon(request.key, stream)

    async def call(self, command: Command) -> Reply:
        reply: Future[Reply] = Future()

        def run() -> None:
            if reply.set_running_or_notify_cancel():
                reply.set_result(self._core.call(command))

        self._post(run)
        seconds = seconds_for(command, CALL_SECONDS)
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.wrap_future(reply)
        except TimeoutError:
            message = f"the engine did not answer {command.name} within {seconds:g} s"
            raise RequestFailed(FailCause.TIMEOUT, message) from None

    async def describe(self) -> ModelCard:
        return self._card

    def wake(self) -> None:
        """Wake the thread to poll the connectors. Callable from any thread."""
        self._inbox.put(lambda: None)

    async def close(self) -> None:
        """Abort running requests, end the thread and the executor. May be called twice."""
        self._closing.set()
        self.wake()
        await asyncio.to_thread(self._thread.join, JOIN_SECONDS)
        if self._thread.is_alive():
            logger.warning("the engine's thread did not end within %g s", JOIN_SECONDS)

    def _post(self, work: Callable[[], None]) -> None:
        with self._lock:
            if self._ended is not None:
                raise RequestFailed(self._ended.cause, str(self._ended))
            self._inbox.put(work)

    def _abandon(self, key: RequestKey, stream: _Stream) -> None:
        def abort() -> None:
            if self._streams.get(key) is stream:
                del self._streams[key]
                self._core.abort(key)

        self._inbox.put(abort)

    def _end_choices(self, key: RequestKey, choices: tuple[int, ...]) -> None:
        self._inbox.put(lambda: self._core.end_choices(key, choices))

    def _run(self) -> None:
        ended = RequestFailed(FailCause.DRAINING, "the engine was closed")
        try:
            self._loop()
        except Exception as error:
            logger.exception("the engine failed")
            ended = RequestFailed(FailCause.INTERNAL, f"the engine failed: {error}")
        try:
            with self._lock:
                self._ended = ended
            self._drain_inbox()
            for stream in list(self._streams.values()):  # streams of a closed loop leave meanwhile
                self._deliver_to(stream, [ended])
            self._streams.clear()
        except Exception:
            logger.exception("some callers could not be notified of the engine's end")
        finally:
            self._core.close()

    def _loop(self) -> None:
        block = True
        while not self._closing.is_set():
            self._receive(block=block)
            result = self._core.step()
            self._deliver(result)
            block = not result.progressed

    def _receive(self, *, block: bool) -> None:
        timeout = PARKED_SECONDS if self._core.has_work else None
        try:
            self._inbox.get(block, timeout)()
            while True:
                self._inbox.get_nowait()()
        except queue.Empty:
            return

    def _drain_inbox(self) -> None:
        while True:
            try:
                work = self._inbox.get_nowait()
            except queue.Empty:
                return
            try:
                work()
            except Exception:
                logger.exception("a call came too late")

    def _submit(self, request: EngineCoreRequest, stream: _Stream) -> None:
        refusal = self._core.add(request)
        if refusal is None:
            self._streams[request.key] = stream
        else:
            self._deliver_to(stream, [RequestRefused(refusal)])

    def _deliver(self, result: StepOutputs) -> None:
        batches: dict[asyncio.AbstractEventLoop, list[tuple[_Stream, Item]]] = {}
        ended = set()
        for router, outputs, failed in result.by_router():
            news: list[EngineOutput | Failed] = [*outputs, *failed]
            for message in news:
                key = RequestKey(router, message.request, message.attempt)
                stream = self._streams.get(key)
                if stream is None:
                    continue
                batches.setdefault(stream.loop, []).append((stream, _item_of(message)))
                if isinstance(message, Failed) or message.finish is not None:
                    ended.add(key)
        for of, refusals in result.refused.items():
            for each in refusals:
                stream = self._streams.pop(RequestKey(of, each.request, each.attempt), None)
                if stream is not None:
                    batches.setdefault(stream.loop, []).append(
                        (stream, RequestRefused(each.refusal))
                    )
        for key in ended:
            if not self._core.holds(key):
                self._streams.pop(key, None)  # a refusal in the same step may have removed it
        for loop, batch in batches.items():
            self._hand_to_loop(loop, batch)

    def _deliver_to(self, stream: _Stream, items: list[Item]) -> None:
        self._hand_to_loop(stream.loop, [(stream, item) for item in items])

    def _hand_to_loop(
        self, loop: asyncio.AbstractEventLoop, batch: list[tuple[_Stream, Item]]
    ) -> None:
        def put() -> None:
            for stream, item in batch:
                stream.put(item)

        try:
            loop.call_soon_threadsafe(put)
        except RuntimeError:  # the loop is closed
            gone = {id(stream) for stream, _ in batch}
            for key in [key for key, stream in self._streams.items() if id(stream) in gone]:
                del self._streams[key]
                self._core.abort(key)


def _item_of(message: EngineOutput | Failed) -> Item:
    return RequestFailed(message.cause, message.message) if isinstance(message, Failed) else message
