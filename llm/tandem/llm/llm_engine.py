"""``LLMEngine``: the synchronous face of ``AsyncLLM``, for loops that add requests and step.

An event loop of its own in a thread carries the requests, so that it works where the caller's
thread already runs a loop (a notebook) and Ctrl-C reaches the caller. Thin on purpose: batching and
order are the engine's business.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar

from tandem.llm.async_llm import AsyncLLM
from tandem.llm.calls import CLOSED, Gate, call
from tandem.llm.checks import check_chats, check_prompts
from tandem.llm.metrics import Metric, read
from tandem.llm.outputs import PooledRequestOutput, RequestOutput, ScoringRequestOutput
from tandem.llm.pooled import pool_batch, score_batch
from tandem.llm.prepared import PreparedRequest
from tandem.llm.sampling import Params
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

_log = logging.getLogger(__name__)

STEP_SECONDS = 600.0
"""Longest silence of the engine about any request."""
CALL_SECONDS = 60.0
"""Longest wait for the loop to take or drop a request."""

Told = tuple[str, RequestOutput | Exception]
"""The id of a request, and an output of it or what it failed with."""
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
        self._loop, self._gate = asyncio.new_event_loop(), Gate()
        self._thread = threading.Thread(
            target=_run_loop, args=(self._loop,), name="llm", daemon=True
        )
        self._ready: queue.SimpleQueue[tuple[PreparedRequest, RequestOutput | Exception] | None]
        self._ready = queue.SimpleQueue()
        """None once the engine is closed."""
        self._running: dict[str, _Running] = {}
        self._kept: list[Told] = []
        """Of ``put_back``."""
        self._made: AsyncLLM | None = None
        """Known to the loop even if nobody waits for it any more."""
        self._thread.start()
        try:
            self._llm = self._call(self._make(make), timeout=None)
        except BaseException as error:
            asyncio.run_coroutine_threadsafe(self._undo(), self._loop)
            if isinstance(error, Exception):  # else a model may be loading: nobody waits for that
                self._thread.join(CALL_SECONDS)
            raise

    @property
    def card(self) -> ModelCard:
        """What is served."""
        return self._call(self._llm.card())

    @property
    def num_outputs(self) -> int:
        """Return what the engine has said to all requests so far, a token or several each."""
        return self._llm.num_outputs

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

    def reset_prefix_cache(self) -> bool:
        """Drop what is cached of prompts. False where KV is held that may not go yet."""
        return self._call(self._llm.reset_prefix_cache()).ok

    def profile(self, name: CommandName) -> str:
        """Start or stop a profile; the file. Raises RequestFailed in the engine's words."""
        reply = self._call(self._llm.call(name), timeout=PROFILE_SECONDS)
        if not reply.ok:
            raise RequestFailed(FailCause.INTERNAL, reply.message)
        return reply.message

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether ``step`` has something to wait for."""
        return bool(self._running) or bool(self._kept)

    def knows(self, request_id: str) -> bool:
        """Whether a request of that id runs, or has an end that nobody was told."""
        return request_id in self._running or any(name == request_id for name, _ in self._kept)

    def check(self, prompts: Sequence[PromptLike], params: Sequence[Params]) -> None:
        """Raise the InvalidParameter that adding one of ``prompts`` with its ``params`` would, as
        far as that is soon known (see ``checks``). Nothing is added."""
        self._call(check_prompts(self._llm, prompts, params), timeout=None)

    def check_chats(
        self,
        chats: Sequence[Sequence[Mapping[str, Any]]],
        params: Sequence[Params],
        chat: ChatOptions | None,
    ) -> None:
        """``check`` of chats."""
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
        """What ``shown`` makes of that to which ``prompts`` come, in their order. At most
        ``at_once`` of them are in the engine at a time, and tokens for some steps: while it
        computes these, those that follow are prepared and answers are made of those before.

        Raises InvalidParameter, for ids before any of the batch runs; what the first one failed
        with; and RequestFailed when the engine answered none of them for ``STEP_SECONDS``. Then,
        and after Ctrl-C, nothing of the batch goes on; an error's ``answers`` are those until then.
        """
        work = pool_batch(self._llm, prompts, params, shown, at_once=at_once, seconds=STEP_SECONDS)
        return self._call(work, timeout=None)

    def score(
        self, first: Side, second: Side, *, activation: bool | None, at_once: int
    ) -> list[ScoringRequestOutput]:
        """A score for each pair, in order. Raises as ``pool`` does, but all of InvalidParameter
        before any of the batch runs, and without answers."""
        work = score_batch(
            self._llm, first, second, activation=activation, at_once=at_once, seconds=STEP_SECONDS
        )
        return self._call(work, timeout=None)

    def step(self, timeout: float = STEP_SECONDS) -> list[RequestOutput]:
        """Wait for outputs and return all that are there, in the order in which they came.

        Raises what a request failed with (that request is over, outputs before it come first), and
        RequestFailed when the engine said nothing of any request within ``timeout`` seconds: while
        tokens come that are shown at their request's end, they are waited for.
        """
        told = self.take(timeout)
        outputs: list[RequestOutput] = []
        for at, (_, item) in enumerate(told):
            if isinstance(item, RequestOutput):
                outputs.append(item)
                continue
            self.put_back(told[at if outputs else at + 1 :])
            if not outputs:
                raise item
            break
        return outputs

    def take(self, timeout: float = STEP_SECONDS) -> list[Told]:
        """What ``step`` waits for, failures of requests among it, each with its request's id.
        Raises RequestFailed when nothing came in time, or the engine is closed."""
        heard, deadline = self._llm.num_outputs, time.monotonic() + timeout
        told, self._kept = self._kept, []
        try:
            while not told or not self._ready.empty():
                try:
                    found = self._next(max(0.0, deadline - time.monotonic()))
                except queue.Empty:
                    before, heard = heard, self._llm.num_outputs
                    if heard == before:
                        message = f"no output for {timeout:g} s"
                        raise RequestFailed(FailCause.TIMEOUT, message) from None
                    deadline = time.monotonic() + timeout
                    continue
                if found is not None:
                    told.append(found)
        except BaseException:
            self.put_back(told)
            raise
        return told

    def put_back(self, told: Iterable[Told]) -> None:
        """Have the next ``step`` or ``take`` begin with what was taken and is another's."""
        self._kept += told

    def abort_request(self, request_id: str | Iterable[str]) -> None:
        """End a request or several, known or not; outputs of theirs that were not fetched are lost,
        and so is what they failed with."""
        wanted = {request_id} if isinstance(request_id, str) else set(request_id)
        self._kept = [each for each in self._kept if each[0] not in wanted]
        if wanted and not self._gate.is_shut:
            self._call(self._abort(wanted))

    def close(self) -> None:
        """Abort what runs and close the client; who waits for outputs hears of it. May be called
        twice."""
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
        """Begin to carry it, and know that: Ctrl-C may keep the caller from learning of either."""
        task = asyncio.create_task(self._follow(prepared))
        self._running[prepared.request_id] = _Running(prepared, task)

    async def _abort(self, request_ids: Iterable[str]) -> None:
        """End those that run, behind all that was asked of the loop before, and wait until they
        have let go of their requests."""
        running = [self._running.pop(each, None) for each in request_ids]
        tasks = [each.task for each in running if each is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _follow(self, prepared: PreparedRequest) -> None:
        """Carry one request to its end, in the loop."""
        try:
            async with aclosing(self._llm.stream(prepared)) as outputs:
                async for output in outputs:
                    self._ready.put((prepared, output))
        except Exception as error:
            self._ready.put((prepared, error))

    def _next(self, remaining: float) -> Told | None:
        """What comes next; None where its request was aborted. Raises queue.Empty after so many
        seconds, and RequestFailed once the engine is closed."""
        found = self._ready.get(timeout=remaining)
        if found is None:
            self._ready.put(None)  # for whoever waits next
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
        """End what was made for nobody, and the loop."""
        try:
            await _end_others()
            if self._made is not None:
                await self._made.close()
            await _end_rest()
        except Exception:
            _log.exception("an engine that nobody waits for could not be closed")
        finally:
            self._loop.stop()

    def _last(self, work: Coroutine[Any, Any, object]) -> None:
        """Behind the shut gate."""
        call(work, self._loop, CALL_SECONDS, Gate())


async def _end_others() -> None:
    """Cancel all tasks of the loop but this one, and wait until they have ended."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


async def _end_rest() -> None:
    """Let open generators and threads end before the loop does."""
    loop = asyncio.get_running_loop()
    await loop.shutdown_asyncgens()
    await loop.shutdown_default_executor()


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()
