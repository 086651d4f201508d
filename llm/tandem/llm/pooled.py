"""Batches whose prompts are pooled or scored, in the event loop of an ``AsyncLLM``.

Used by ``LLMEngine``. While an engine computes some prompts, later prompts are prepared and earlier
outputs are converted.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

from tandem.llm.async_llm import AsyncLLM
from tandem.llm.checks import name_of
from tandem.llm.outputs import PooledRequestOutput, ScoringRequestOutput
from tandem.llm.patience import Patience
from tandem.llm.prepared import PreparedRequest
from tandem.llm.scoring import Side, all_of, prepare_scores
from tandem.llm.weighing import parts_of, prompt_tokens
from tandem.llm.window import Window
from tandem.protocol.errors import FailCause, RequestFailed
from tandem.protocol.pooling import PoolingParams
from tandem.text.prompts import PromptLike

STEPS_AHEAD = 4
"""Maximum tokens of a pooled batch in the engine, in steps: two are launched, two follow. Preparing
all prompts first would delay the launches that the device waits for."""

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
    """Return the results of ``shown`` on the outputs of ``prompts``, in order. At most ``at_once``
    prompts are in the engine at a time, and tokens for ``STEPS_AHEAD`` steps.

    Raises InvalidParameter, and the first error of a prompt. Its ``answers`` are those completed
    until then. Raises RequestFailed if the engine answered none for ``seconds``.
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
        await asyncio.sleep(0)  # others' turn, an interrupt's among them
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
    """Return a score per pair, in order. Raises as ``pool_batch``, without ``answers``."""
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
    """Return the output of one prompt of a batch."""
    patience.begin()
    try:
        return await llm.pool(prepared)
    finally:
        patience.end()
