"""``LLMEngine``: the synchronous face of ``AsyncLLM``, for loops that add requests and step.

An event loop of its own in a thread carries the requests, so that it works where the caller's
thread already runs a loop (a notebook) and Ctrl-C reaches the caller. Thin on purpose: batching and
order are the engine's business.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from itertools import chain
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar

from tandem.llm.async_llm import AsyncLLM
from tandem.llm.calls import call
from tandem.llm.metrics import Metric, read
from tandem.llm.outputs import PooledRequestOutput, RequestOutput, ScoringRequestOutput
from tandem.llm.patience import Patience
from tandem.llm.prepared import PreparedRequest
from tandem.llm.sampling import Params
from tandem.llm.scoring import Side, all_of, prepare_scores
from tandem.llm.weighing import parts_of, prompt_tokens
from tandem.llm.window import Window
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

STEP_SECONDS = 600.0
"""Longest silence of the engine about any request."""
STEPS_AHEAD = 4
"""Of a batch that is pooled, steps' worth of tokens in the engine at a time: two are launched, two
follow. Preparing all first would keep the interpreter from launching what the device waits for."""
CALL_SECONDS = 60.0
"""Longest wait for the loop to take or drop a request."""

_Result = TypeVar("_Result")


class _Running(NamedTuple):
    prepared: PreparedRequest
    """Tells it from an earlier request of the same id."""
    task: asyncio.Task[None]


class LLMEngine:
    """Add requests, then ``step`` until ``has_unfinished_requests`` is false."""

    def __init__(
        self,
        make: Callable[[], Coroutine[Any, Any, AsyncLLM]],
        *,
        collect: Callable[[], Iterable[Family]] = tuple,
    ) -> None:
        """``make`` builds the AsyncLLM inside the engine's own loop; its errors are raised here.
        ``collect`` gives the series of an engine that runs in this process."""
        self._collect = collect
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="llm", daemon=True)
        self._thread.start()
        self._ready: queue.SimpleQueue[tuple[PreparedRequest, RequestOutput | Exception]]
        self._ready = queue.SimpleQueue()
        self._running: dict[str, _Running] = {}
        self._failed: tuple[str, Exception] | None = None
        """What a request failed with, by its id, that ``step`` has not raised yet."""
        try:
            self._llm = self._call(make(), timeout=None)
        except BaseException:
            self._stop_loop()
            raise

    @property
    def card(self) -> ModelCard:
        """What is served."""
        return self._call(self._llm.card())

    def get_metrics(self) -> list[Metric]:
        """What the engine has counted until now; nothing where it is not in this process."""
        return read(self._collect())

    def sleep(self, level: int, mode: str, timeout: float) -> None:
        """See ``AsyncLLM.sleep``. Raises RequestFailed when the engine stays awake."""
        self._do(self._llm.sleep(level, mode, timeout))

    def wake_up(self, tags: Sequence[str] | None) -> None:
        """See ``AsyncLLM.wake_up``. Raises RequestFailed for what could not be taken again."""
        self._do(self._llm.wake_up(tags))

    @property
    def is_sleeping(self) -> bool:
        """Whether requests are refused until ``wake_up``."""
        return self._call(self._llm.is_sleeping())

    def profile(self, name: CommandName) -> str:
        """Start or stop a profile; the file. Raises RequestFailed in the engine's words."""
        reply = self._call(self._llm.call(name), timeout=PROFILE_SECONDS)
        if not reply.ok:
            raise RequestFailed(FailCause.INTERNAL, reply.message)
        return reply.message

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether ``step`` has something to wait for."""
        return bool(self._running) or self._failed is not None

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
        """What ``shown`` makes of that to which ``prompts`` come, in their order. At most
        ``at_once`` of them are in the engine at a time, and tokens for some steps: while it
        computes these, those that follow are prepared and answers are made of those before.

        Raises InvalidParameter, what the first one failed with, and RequestFailed when one took
        ``STEP_SECONDS``; then, and after Ctrl-C, nothing of the batch goes on.
        """
        return self._call(self._pool_all(prompts, params, shown, at_once), timeout=None)

    def score(
        self, first: Side, second: Side, *, activation: bool | None, at_once: int
    ) -> list[ScoringRequestOutput]:
        """A score for each pair, in order. Raises as ``pool`` does."""
        return self._call(self._score_all(first, second, activation, at_once), timeout=None)

    def step(self, timeout: float = STEP_SECONDS) -> list[RequestOutput]:
        """Wait for outputs and return all that are there, in the order in which they came.

        Raises what a request failed with (that request is over, outputs before it come first), and
        RequestFailed when the engine said nothing of any request within ``timeout`` seconds: while
        tokens come that are shown at their request's end, they are waited for.
        """
        heard, deadline = self._llm.num_outputs, time.monotonic() + timeout
        outputs: list[RequestOutput] = []
        while not outputs or not self._ready.empty():
            try:
                found = self._next(max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                before, heard = heard, self._llm.num_outputs
                if heard == before:
                    message = f"no output for {timeout:g} s"
                    raise RequestFailed(FailCause.TIMEOUT, message) from None
                deadline = time.monotonic() + timeout
                continue
            if found is None:
                continue
            item = found[1]
            if isinstance(item, RequestOutput):
                outputs.append(item)
            elif outputs:
                self._failed = found[0], item
                break
            else:
                raise item
        return outputs

    def abort_request(self, request_id: str) -> None:
        """End a request, known or not; its outputs that were not fetched are lost, and so is what
        it failed with."""
        if self._failed is not None and self._failed[0] == request_id:
            self._failed = None
        running = self._running.pop(request_id, None)
        if running is not None:
            self._call(_cancel(running.task))

    def close(self) -> None:
        """Abort what runs and close the client. May be called twice."""
        if self._loop.is_closed():
            return
        for request_id in list(self._running):
            self.abort_request(request_id)
        try:
            self._call(self._llm.close())
        finally:
            self._stop_loop()

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
        task = self._call(_spawn(self._follow(prepared)))
        self._running[prepared.request_id] = _Running(prepared, task)

    async def _pool_all(
        self,
        prompts: Sequence[PromptLike],
        params: PoolingParams | None,
        shown: Callable[[PooledRequestOutput], _Result],
        at_once: int,
    ) -> list[_Result]:
        llm, step = self._llm, (await self._llm.card()).max_num_batched_tokens
        window = Window(at_once, STEPS_AHEAD * step)

        async def one(prepared: PreparedRequest, weight: int, patience: Patience) -> _Result:
            try:
                return shown(await _patiently(llm, prepared, patience))
            finally:
                window.give(weight)

        async def several(part: Sequence[PromptLike], patience: Patience) -> list[_Result]:
            weights = [prompt_tokens(each) for each in part]
            await window.take(sum(weights), len(part))
            prepared = await llm.prepare_all_pooling(part, params)
            ready = zip(prepared, weights, strict=True)
            return await all_of([one(*each, patience) for each in ready])

        async with _patience() as patience:
            parts = parts_of(prompts, step, at_once)
            found = await all_of([several(part, patience) for part in parts])
        return list(chain.from_iterable(found))

    async def _score_all(
        self, first: Side, second: Side, activation: bool | None, at_once: int
    ) -> list[ScoringRequestOutput]:
        prepared = await prepare_scores(self._llm, first, second, activation=activation)
        seats = asyncio.Semaphore(at_once)

        async def one(request: PreparedRequest, patience: Patience) -> PooledRequestOutput:
            async with seats:
                return await _patiently(self._llm, request, patience)

        async def every(requests: Sequence[PreparedRequest]) -> list[PooledRequestOutput]:
            async with _patience() as patience:
                return await all_of([one(each, patience) for each in requests])

        scores, _ = await prepared.scores(every)
        return scores

    async def _follow(self, prepared: PreparedRequest) -> None:
        """Carry one request to its end, in the loop."""
        try:
            async with aclosing(self._llm.stream(prepared)) as outputs:
                async for output in outputs:
                    self._ready.put((prepared, output))
        except Exception as error:
            self._ready.put((prepared, error))

    def _next(self, remaining: float) -> tuple[str, RequestOutput | Exception] | None:
        """A request's id, and its next output or failure; None where it was aborted. Raises
        queue.Empty after so many seconds."""
        if self._failed is not None:
            failed, self._failed = self._failed, None
            return failed
        prepared, item = self._ready.get(timeout=remaining)
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
        return call(work, self._loop, timeout)

    def _stop_loop(self) -> None:
        self._call(_end_tasks())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@asynccontextmanager
async def _patience() -> AsyncIterator[Patience]:
    """That of a batch. Raises RequestFailed when one of it took ``STEP_SECONDS``."""
    try:
        async with Patience(STEP_SECONDS) as patience:
            yield patience
    except TimeoutError:
        message = f"no vector for {STEP_SECONDS:g} s"
        raise RequestFailed(FailCause.TIMEOUT, message) from None


async def _patiently(
    llm: AsyncLLM, prepared: PreparedRequest, patience: Patience
) -> PooledRequestOutput:
    """What one of a batch comes to."""
    wait = patience.begin()
    try:
        return await llm.pool(prepared)
    finally:
        patience.end(wait)


async def _spawn(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    return asyncio.create_task(work)


async def _cancel(task: asyncio.Task[None]) -> None:
    """End it, and wait until it has let go of its request."""
    task.cancel()
    await asyncio.wait([task])


async def _end_tasks() -> None:
    """Let cancelled tasks and open generators end before the loop does."""
    loop = asyncio.get_running_loop()
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await loop.shutdown_asyncgens()
    await loop.shutdown_default_executor()
