"""Batches whose prompts are pooled or scored, in the event loop of an ``AsyncLLM``.

While an engine computes, later prompts are prepared and outputs converted.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import NamedTuple, Self, TypeVar

from tandem.llm.async_llm import AsyncLLM
from tandem.llm.checks import name_of
from tandem.llm.outputs import PooledRequestOutput, ScoringRequestOutput
from tandem.llm.sampling import PreparedRequest, parts_of, prompt_tokens
from tandem.llm.scoring import Side, all_of, prepare_scores
from tandem.protocol.errors import FailCause, RequestFailed
from tandem.protocol.pooling import PoolingParams
from tandem.text.prompts import PromptLike


class _Waiting(NamedTuple):
    weight: int
    places: int
    turn: asyncio.Future[None]


class Window:
    """Limit of concurrent requests and of their tokens, in FIFO order.

    A request above a limit runs alone. Belongs to one event loop.
    """

    def __init__(self, most: int, tokens: int) -> None:
        """Allow ``most`` requests with ``tokens`` tokens in total, both at least 1."""
        self._places = most
        self._most = self._tokens = tokens
        self._waiting: deque[_Waiting] = deque()

    async def take(self, weight: int, places: int = 1) -> None:
        """Wait for ``places`` places with ``weight`` tokens, after all earlier waiters."""
        if not self._waiting and self._has_room(weight, places):
            self._seat(weight, places)
            return
        waiting = _Waiting(weight, places, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        try:
            await waiting.turn
        except asyncio.CancelledError:
            if waiting.turn.cancelled():
                self._call_next()
            else:  # granted, and cancelled before it continued
                self.give(weight, places)
            raise

    def give(self, weight: int, places: int = 1) -> None:
        """Return places, all at once or one by one."""
        self._places += places
        self._tokens += weight
        self._call_next()

    def _call_next(self) -> None:
        while self._waiting:
            weight, places, turn = self._waiting[0]
            if not turn.cancelled():
                if not self._has_room(weight, places):
                    return
                self._seat(weight, places)
                turn.set_result(None)
            self._waiting.popleft()

    def _has_room(self, weight: int, places: int) -> bool:
        if self._tokens == self._most:  # no request is running
            return True
        return self._places >= places and weight <= self._tokens

    def _seat(self, weight: int, places: int) -> None:
        self._places -= places
        self._tokens -= weight


class Patience:
    """Context that raises TimeoutError if no wait ends for too long."""

    def __init__(self, seconds: float) -> None:
        """Allow at most ``seconds`` between ends of waits. Belongs to one task."""
        self._seconds = seconds
        self._limit = asyncio.timeout(None)
        self._waits = 0
        self._output_at = 0.0
        """Time of the last end, or of the first begin."""
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Start a wait, without extending the deadline."""
        if not self._waits:
            self._output_at = self._loop.time()
        self._waits += 1
        if self._timer is None:
            self._look()

    def end(self) -> None:
        self._waits -= 1
        self._output_at = self._loop.time()

    async def __aenter__(self) -> Self:
        await self._limit.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await self._limit.__aexit__(kind, error, trace)

    def _look(self) -> None:
        """Raise the timeout if it is due, or schedule the next check."""
        self._timer = None
        if not self._waits:
            return
        due = self._output_at + self._seconds
        if due <= self._loop.time():
            self._limit.reschedule(self._loop.time())
        else:
            self._timer = self._loop.call_at(due, self._look)


STEPS_AHEAD = 4
"""Maximum tokens of a pooled batch in the engine, in steps: two launched, two prepared."""

_Result = TypeVar("_Result")


async def pool_batch(
    llm: AsyncLLM,
    prompts: Sequence[PromptLike],
    params: PoolingParams | None,
    shown: Callable[[PooledRequestOutput], _Result],
    *,
    at_once: int,
    seconds: float,
) -> list[_Result]:
    """Return the results of ``shown`` on the outputs of ``prompts``, in order.

    At most ``at_once`` prompts, and tokens for ``STEPS_AHEAD`` steps, are in the engine. Raises
    InvalidParameter, the first error of a prompt with the ``answers`` until then, and RequestFailed
    after ``seconds`` without an answer.
    """
    step = (await llm.card()).max_num_batched_tokens
    window, found = Window(at_once, STEPS_AHEAD * step), dict[int, _Result]()

    def names(first: int, count: int) -> list[str]:
        return [name_of("prompt", at, len(prompts)) for at in range(first, first + count)]

    async def one(at: int, prepared: PreparedRequest, weight: int, patience: Patience) -> None:
        try:
            found[at] = shown(await _patiently(llm, prepared, patience))
        finally:
            window.give(weight)

    async def several(first: int, part: Sequence[PromptLike], patience: Patience) -> None:
        weights = [prompt_tokens(each) for each in part]
        await window.take(sum(weights), len(part))
        called = names(first, len(part))
        prepared = await llm.prepare_all_pooling(part, params, names=called)
        ready = enumerate(zip(prepared, weights, strict=True), first)
        await all_of([one(at, *each, patience) for at, each in ready])

    parts, first = {}, 0
    for part in parts_of(prompts, step, at_once):
        await llm.check_pooling(part, params, names(first, len(part)))
        await asyncio.sleep(0)  # let others run, an interrupt among them
        parts[first] = part
        first += len(part)
    try:
        async with _patience(seconds) as patience:
            await all_of([several(*each, patience) for each in parts.items()])
    except Exception as error:
        error.answers = found  # type: ignore[attr-defined]  # of whatever kind it is
        raise
    return [found[at] for at in range(len(prompts))]


async def score_batch(
    llm: AsyncLLM,
    first: Side,
    second: Side,
    *,
    activation: bool | None,
    at_once: int,
    seconds: float,
) -> list[ScoringRequestOutput]:
    """Return a score for each pair, in order.

    Raises the errors of ``pool_batch``, but without their ``answers``.
    """
    prepared = await prepare_scores(llm, first, second, activation=activation)
    seats = asyncio.Semaphore(at_once)

    async def one(request: PreparedRequest, patience: Patience) -> PooledRequestOutput:
        async with seats:
            return await _patiently(llm, request, patience)

    async def every(requests: Sequence[PreparedRequest]) -> list[PooledRequestOutput]:
        async with _patience(seconds) as patience:
            return await all_of([one(each, patience) for each in requests])

    scores, _ = await prepared.scores(every)
    return scores


@asynccontextmanager
async def _patience(seconds: float) -> AsyncIterator[Patience]:
    """Yield a batch's ``Patience``. Raises RequestFailed if no request was answered in time."""
    try:
        async with Patience(seconds) as patience:
            yield patience
    except TimeoutError:
        message = f"no vector for {seconds:g} s"
        raise RequestFailed(FailCause.TIMEOUT, message) from None


async def _patiently(
    llm: AsyncLLM, prepared: PreparedRequest, patience: Patience
) -> PooledRequestOutput:
    patience.begin()
    try:
        return await llm.pool(prepared)
    finally:
        patience.end()
