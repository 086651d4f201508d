"""``LLMEngine``: the synchronous interface of ``AsyncLLM``, for loops that add requests and step.

Requests run in an event loop of its own thread, so it works in notebooks, and Ctrl-C reaches the
caller.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import (
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import CancelledError, Future
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from threading import Lock
from types import TracebackType
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    NamedTuple,
    Self,
    TypeVar,
)

from tandem.llm.async_llm import AsyncLLM
from tandem.llm.checks import check_chats, check_prompts
from tandem.llm.outputs import PooledRequestOutput, RequestOutput, ScoringRequestOutput
from tandem.llm.pooled import pool_batch, score_batch
from tandem.llm.sampling import Params, PreparedRequest
from tandem.llm.scoring import Side
from tandem.protocol.card import ModelCard
from tandem.protocol.commands import (
    MAX_SLEEP_WAIT_S,
    MEMORY_SECONDS,
    PROFILE_SECONDS,
    CommandName,
    Reply,
)
from tandem.protocol.errors import FailCause, InvalidParameter, RequestFailed
from tandem.protocol.pooling import PoolingParams
from tandem.text.chat_template import ChatOptions
from tandem.text.input_processor import InputOptions
from tandem.text.prompts import PromptLike

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family


@dataclass(frozen=True, slots=True)
class Metric:
    """Series: a name, and distinguishing labels."""

    name: str
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Counter(Metric):
    """A value that only grows."""

    value: float


@dataclass(frozen=True, slots=True)
class Gauge(Metric):
    """A current value."""

    value: float


@dataclass(frozen=True, slots=True)
class Histogram(Metric):
    """Cumulative counts of values by bucket bound, and their total count and sum."""

    count: int
    sum: float
    buckets: Mapping[str, int] = field(default_factory=dict)


def read(families: Iterable[Family]) -> list[Metric]:
    """Return every series. Names are those of a scrape; counters lack _total."""
    return [metric for family in families for metric in _series(family)]


def _series(family: Family) -> Iterator[Metric]:
    if family.type == "histogram":
        yield from _histograms(family)
        return
    for sample in family.samples:
        if family.type == "gauge":
            yield Gauge(sample.name, sample.labels, sample.value)
        elif family.type == "counter" and sample.name.endswith("_total"):
            yield Counter(family.name, sample.labels, sample.value)


def _histograms(family: Family) -> Iterator[Metric]:
    found: dict[tuple[tuple[str, str], ...], dict[str, float]] = {}
    for sample in family.samples:
        labels = {name: value for name, value in sample.labels.items() if name != "le"}
        parts = found.setdefault(tuple(labels.items()), {})
        ending = sample.name.removeprefix(family.name)
        parts[sample.labels["le"] if ending == "_bucket" else ending] = sample.value
    for key, parts in found.items():
        count, total = int(parts.pop("_count", 0)), parts.pop("_sum", 0.0)
        parts.pop("_created", None)
        buckets = {bound: int(value) for bound, value in parts.items()}
        yield Histogram(family.name, dict(key), count, total, buckets)


CLOSED = "the engine is closed"
_Result = TypeVar("_Result")


class Gate:
    """Entry to a loop that may end: no work is accepted after ``shut``."""

    def __init__(self) -> None:
        self._lock = Lock()
        self.is_shut = False

    def shut(self) -> None:
        with self._lock:
            self.is_shut = True

    def post(self, called: _Called[_Result], loop: asyncio.AbstractEventLoop) -> Future[_Result]:
        """Start the work in ``loop``. Raises RequestFailed if the gate is shut."""
        with self._lock:
            if self.is_shut:
                called.give_up()
                raise RequestFailed(FailCause.INTERNAL, CLOSED)
            return asyncio.run_coroutine_threadsafe(called.run(), loop)


def call(
    work: Coroutine[Any, Any, _Result],
    loop: asyncio.AbstractEventLoop,
    timeout: float | None,
    gate: Gate,
) -> _Result:
    """Return or raise the result of ``work`` in ``loop``, which runs in another thread.

    Ending the wait cancels the work: TimeoutError after ``timeout`` seconds, or KeyboardInterrupt.
    Raises RequestFailed if the loop ends.
    """
    called = _Called(work)
    try:
        return gate.post(called, loop).result(timeout)
    except CancelledError as error:  # the loop ended, maybe before the work began
        work.close()
        raise RequestFailed(FailCause.INTERNAL, CLOSED) from error
    except BaseException:
        with suppress(RuntimeError):  # a closed loop runs nothing
            loop.call_soon_threadsafe(called.give_up)
        raise


class _Called(Generic[_Result]):
    """Work and its task. Used in the loop."""

    def __init__(self, work: Coroutine[Any, Any, _Result]) -> None:
        self._work = work
        self._task: asyncio.Task[Any] | None = None

    async def run(self) -> _Result:
        self._task = asyncio.current_task()
        return await self._work

    def give_up(self) -> None:
        """Cancel the work, in the loop."""
        if self._task is None:
            self._work.close()
        else:
            self._task.cancel()


_log = logging.getLogger(__name__)

STEP_SECONDS = 600.0
"""Maximum seconds without any output."""
CALL_SECONDS = 60.0
"""Maximum seconds for the loop to take or drop a request."""

QueuedItem = tuple[str, RequestOutput | Exception]
"""Id of a request, and its output or error."""


class _Running(NamedTuple):
    prepared: PreparedRequest
    """Distinguishes requests with the same id."""
    task: asyncio.Task[None]


class LLMEngine:
    """Add requests, then ``step`` until ``has_unfinished_requests`` is false."""

    def __init__(
        self,
        make: Callable[[], Coroutine[Any, Any, AsyncLLM]],
        *,
        collect: Callable[[], Iterable[Family]] = tuple,
    ) -> None:
        """``make`` builds the AsyncLLM in the engine's loop.

        ``collect`` returns the metrics of an engine in this process.
        """
        self._collect = collect
        self._loop, self._gate = asyncio.new_event_loop(), Gate()
        self._thread = threading.Thread(
            target=_run_loop, args=(self._loop,), name="llm", daemon=True
        )
        self._ready: queue.SimpleQueue[tuple[PreparedRequest, RequestOutput | Exception] | None]
        self._ready = queue.SimpleQueue()
        """Outputs and errors of requests; None after the end."""
        self._running: dict[str, _Running] = {}
        self._kept: list[QueuedItem] = []
        """Items of ``put_back``."""
        self._made: AsyncLLM | None = None
        """Client, even if the caller stopped waiting for it."""
        self._thread.start()
        try:
            self._llm = self._call(self._make(make), timeout=None)
        except BaseException as error:
            asyncio.run_coroutine_threadsafe(self._undo(), self._loop)
            if isinstance(error, Exception):  # a model may still be loading: do not wait
                self._thread.join(CALL_SECONDS)
            raise

    @property
    def card(self) -> ModelCard:
        """Return the card of the served model."""
        return self._call(self._llm.card())

    @property
    def num_outputs(self) -> int:
        """Return the number of outputs of all requests."""
        return self._llm.num_outputs

    def get_metrics(self) -> list[Metric]:
        """Return the engine's metrics so far; empty if it is in another process."""
        return read(self._collect())

    def sleep(self, level: int, mode: str, timeout: float) -> None:
        """Sleep as ``AsyncLLM.sleep`` does. Raises RequestFailed if the engine stays awake."""
        self._do(self._llm.sleep(level, mode, timeout))

    def wake_up(self, tags: Sequence[str] | None) -> None:
        """Wake up as ``AsyncLLM.wake_up`` does. Raises RequestFailed if the allocation fails."""
        self._do(self._llm.wake_up(tags))

    @property
    def is_sleeping(self) -> bool:
        """Return whether requests are refused until ``wake_up``."""
        return self._call(self._llm.is_sleeping())

    def reset_prefix_cache(self) -> bool:
        """Drop cached blocks of prompts. Return False if some KV is still in use."""
        return self._call(self._llm.reset_prefix_cache()).ok

    def profile(self, name: CommandName) -> str:
        """Start or stop a profile and return its file. Raises RequestFailed if the engine
        refuses."""
        reply = self._call(self._llm.call(name), timeout=PROFILE_SECONDS)
        if not reply.ok:
            raise RequestFailed(FailCause.INTERNAL, reply.message)
        return reply.message

    @property
    def has_unfinished_requests(self) -> bool:
        """Return whether ``step`` has outputs to return or to wait for."""
        return bool(self._running) or bool(self._kept)

    def knows(self, request_id: str) -> bool:
        """Return whether a request with that id runs, or has outputs that were put back."""
        return request_id in self._running or any(name == request_id for name, _ in self._kept)

    def check(self, prompts: Sequence[PromptLike], params: Sequence[Params]) -> None:
        """Raise InvalidParameter as adding ``prompts`` would, by a quick check."""
        self._call(check_prompts(self._llm, prompts, params), timeout=None)

    def check_chats(
        self,
        chats: Sequence[Sequence[Mapping[str, Any]]],
        params: Sequence[Params],
        chat: ChatOptions | None,
    ) -> None:
        """Check chats as ``check`` does prompts."""
        self._call(check_chats(self._llm, chats, params, chat), timeout=None)

    def add_request(
        self,
        request_id: str,
        prompt: PromptLike,
        params: Params = None,
        *,
        options: InputOptions | None = None,
    ) -> None:
        """Check and start a prompt. Raises InvalidParameter."""
        self._check_id(request_id)
        self._start(self._call(self._llm.prepare(prompt, params, request_id, options=options)))

    def add_chat(
        self,
        request_id: str,
        messages: Sequence[Mapping[str, Any]],
        params: Params = None,
        *,
        options: InputOptions | None = None,
        chat: ChatOptions | None = None,
    ) -> None:
        """Check and start a chat. Raises InvalidParameter."""
        self._check_id(request_id)
        prepared = self._llm.prepare_chat(messages, params, request_id, options=options, chat=chat)
        self._start(self._call(prepared))

    def pool(
        self,
        prompts: Sequence[PromptLike],
        params: PoolingParams | None,
        shown: Callable[[PooledRequestOutput], _Result],
        *,
        at_once: int,
    ) -> list[_Result]:
        """Return the results of ``shown`` on the outputs of ``prompts``, in order.

        At most ``at_once`` prompts are in the engine. Raises InvalidParameter, the first error of a
        prompt with the ``answers`` until then, and RequestFailed after ``STEP_SECONDS`` without an
        answer. The rest is cancelled.
        """
        work = pool_batch(self._llm, prompts, params, shown, at_once=at_once, seconds=STEP_SECONDS)
        return self._call(work, timeout=None)

    def score(
        self, first: Side, second: Side, *, activation: bool | None, at_once: int
    ) -> list[ScoringRequestOutput]:
        """Return a score for each pair, in order.

        Raises the errors of ``pool``, but without their ``answers``.
        """
        work = score_batch(
            self._llm, first, second, activation=activation, at_once=at_once, seconds=STEP_SECONDS
        )
        return self._call(work, timeout=None)

    def step(self, timeout: float = STEP_SECONDS) -> list[RequestOutput]:
        """Wait for outputs and return all in order of arrival.

        Raises the error of a failed request, after its earlier outputs. Raises RequestFailed after
        ``timeout`` seconds without an output.
        """
        items = self.take(timeout)
        outputs: list[RequestOutput] = []
        for at, (_, item) in enumerate(items):
            if isinstance(item, RequestOutput):
                outputs.append(item)
                continue
            self.put_back(items[at if outputs else at + 1 :])
            if not outputs:
                raise item
            break
        return outputs

    def take(self, timeout: float = STEP_SECONDS) -> list[QueuedItem]:
        """Return outputs and failures with ids, in order of arrival.

        Raises RequestFailed at the timeout, or if the engine is closed.
        """
        seen, deadline = self._llm.num_outputs, time.monotonic() + timeout
        items, self._kept = self._kept, []
        try:
            while not items or not self._ready.empty():
                try:
                    found = self._next(max(0.0, deadline - time.monotonic()))
                except queue.Empty:
                    before, seen = seen, self._llm.num_outputs
                    if seen == before:
                        message = f"no output for {timeout:g} s"
                        raise RequestFailed(FailCause.TIMEOUT, message) from None
                    deadline = time.monotonic() + timeout
                    continue
                if found is not None:
                    items.append(found)
        except BaseException:
            self.put_back(items)
            raise
        return items

    def put_back(self, items: Iterable[QueuedItem]) -> None:
        """Return items to the beginning of the queue."""
        self._kept += items

    def abort_request(self, request_id: str | Iterable[str]) -> None:
        """End requests, known or not, and drop their outputs and errors."""
        wanted = {request_id} if isinstance(request_id, str) else set(request_id)
        self._kept = [each for each in self._kept if each[0] not in wanted]
        if wanted and not self._gate.is_shut:
            self._call(self._abort(wanted))

    def close(self) -> None:
        """Abort running requests and close the client. May be called twice."""
        if self._gate.is_shut:
            return
        self.abort_request(list(self._running))
        self._gate.shut()
        try:
            self._last(self._llm.close())
        finally:
            self._last(_end_others())
            self._last(_end_rest())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._ready.put(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _check_id(self, request_id: str) -> None:
        if request_id in self._running:
            raise InvalidParameter("request_id", request_id, "an id that no running request has")

    def _start(self, prepared: PreparedRequest) -> None:
        self._call(self._begin(prepared))

    async def _begin(self, prepared: PreparedRequest) -> None:
        """Start and register a request in one call, which Ctrl-C cannot split."""
        task = asyncio.create_task(self._follow(prepared))
        self._running[prepared.request_id] = _Running(prepared, task)

    async def _abort(self, request_ids: Iterable[str]) -> None:
        """Cancel running requests and wait for their tasks, after all earlier work of the loop."""
        running = [self._running.pop(each, None) for each in request_ids]
        tasks = [each.task for each in running if each is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _follow(self, prepared: PreparedRequest) -> None:
        try:
            async with aclosing(self._llm.stream(prepared)) as outputs:
                async for output in outputs:
                    self._ready.put((prepared, output))
        except Exception as error:
            self._ready.put((prepared, error))

    def _next(self, remaining: float) -> QueuedItem | None:
        """Return the next output, or None if its request was aborted.

        Raises queue.Empty after ``remaining`` seconds, RequestFailed after the end.
        """
        found = self._ready.get(timeout=remaining)
        if found is None:
            self._ready.put(None)  # for the next waiting thread
            raise RequestFailed(FailCause.INTERNAL, CLOSED)
        prepared, item = found
        running = self._running.get(prepared.request_id)
        if running is None or running.prepared is not prepared:
            return None
        if isinstance(item, Exception) or item.finished:
            del self._running[prepared.request_id]
        return prepared.request_id, item

    def _do(self, command: Coroutine[Any, Any, Reply]) -> None:
        reply = self._call(command, timeout=MAX_SLEEP_WAIT_S + 2 * MEMORY_SECONDS)
        if not reply.ok:
            raise RequestFailed(FailCause.INTERNAL, reply.message)

    def _call(
        self, work: Coroutine[Any, Any, _Result], *, timeout: float | None = CALL_SECONDS
    ) -> _Result:
        return call(work, self._loop, timeout, self._gate)

    async def _make(self, make: Callable[[], Coroutine[Any, Any, AsyncLLM]]) -> AsyncLLM:
        self._made = await make()
        return self._made

    async def _undo(self) -> None:
        """Close a client whose constructor was interrupted, and stop the loop."""
        try:
            await _end_others()
            if self._made is not None:
                await self._made.close()
            await _end_rest()
        except Exception:
            _log.exception("an abandoned engine could not be closed")
        finally:
            self._loop.stop()

    def _last(self, work: Coroutine[Any, Any, object]) -> None:
        call(work, self._loop, CALL_SECONDS, Gate())


async def _end_others() -> None:
    """Cancel all other tasks of the loop, and wait for their ends."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


async def _end_rest() -> None:
    loop = asyncio.get_running_loop()
    await loop.shutdown_asyncgens()
    await loop.shutdown_default_executor()


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()
