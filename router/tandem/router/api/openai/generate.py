"""The common part of chat and completions: from prepared requests to their outputs.

Several prompts of one call run concurrently; their outputs are interleaved.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from starlette.requests import Request

from tandem.llm.async_llm import AsyncLLM
from tandem.llm.outputs import CompletionOutput, RequestOutput
from tandem.llm.prepared import PreparedRequest
from tandem.protocol.context import RequestContext
from tandem.protocol.errors import InvalidParameter
from tandem.protocol.outputs import FinishReason
from tandem.router.api.openai.service import Identified, Service, note_answer, request_id_of
from tandem.router.metrics import RouterMetrics
from tandem.text.input_processor import InputOptions
from tandem.text.prompts import Prompt

Outputs = AsyncGenerator[tuple[int, RequestOutput], None]
"""(index of the prompt, output)."""

_QUEUE = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Common fields of every answer."""

    id: str
    model: str
    created: int


def begin(prefix: str, request_id: str, model: str) -> Answer:
    """Return the frame of an answer that begins now."""
    return Answer(id=f"{prefix}-{request_id}", model=model, created=int(time.time()))


def begin_for(request: Request, body: Identified, prefix: str, model: str) -> Answer:
    """Return the frame of a request's answer. Raises InvalidParameter for an invalid id."""
    answer = begin(prefix, request_id_of(request, body), model)
    note_answer(request, answer.id)
    return answer


async def prepare_all(
    llm: AsyncLLM,
    prompts: Sequence[Prompt],
    params: Mapping[str, object],
    options: InputOptions,
) -> list[PreparedRequest]:
    """Prepare prompts one after the other, and yield to other requests in between: many small
    prompts delay no other request.

    Raises InvalidParameter that names the prompt if there are several.
    """
    prepared: list[PreparedRequest] = []
    for index, prompt in enumerate(prompts):
        if prepared:
            await asyncio.sleep(0)
        try:
            prepared.append(await llm.prepare(prompt, params, options=options))
        except InvalidParameter as error:
            if error.param == "prompt" and len(prompts) > 1:
                error.param = f"prompt[{index}]"
            raise
    return prepared


async def run(
    service: Service, prepared: Sequence[PreparedRequest], context: RequestContext
) -> Outputs:
    """Yield the outputs of all prompts, some of them at a time. Closing it aborts them all."""
    metrics = service.counters(context)
    if len(prepared) == 1:
        async with aclosing(service.llm.stream(prepared[0], context)) as outputs:
            async for output in outputs:
                count_finished(metrics, output)
                yield 0, output
        return
    async with aclosing(_merged(service, prepared, context)) as merged:
        async for index, output in merged:
            count_finished(metrics, output)
            yield index, output


async def _merged(
    service: Service, prepared: Sequence[PreparedRequest], context: RequestContext
) -> Outputs:
    """Merge the outputs of concurrent prompts through a bounded queue; the first error ends all."""
    turns = asyncio.Semaphore(service.max_parallel_prompts)
    queue: asyncio.Queue[tuple[int, RequestOutput | Exception | None]] = asyncio.Queue(_QUEUE)

    async def pump(index: int) -> None:
        try:
            async with turns, aclosing(service.llm.stream(prepared[index], context)) as outputs:
                async for output in outputs:
                    await queue.put((index, output))
        except Exception as error:
            await queue.put((index, error))
        else:
            await queue.put((index, None))

    tasks = [asyncio.create_task(pump(index)) for index in range(len(prepared))]
    try:
        open_streams = len(tasks)
        while open_streams:
            index, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                open_streams -= 1
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def count_finished(metrics: RouterMetrics, output: RequestOutput) -> None:
    """Count the choices that end with this output, by their reason."""
    for choice in output.outputs:
        if choice.finish_reason is not None:
            metrics.choice_finished(choice.finish_reason)


class Totals:
    """Usage over all prompts of a call, as far as they have come."""

    __slots__ = ("_counted", "num_cached", "num_generated", "num_prompt")

    def __init__(self, last: Iterable[tuple[int, RequestOutput]] = ()) -> None:
        """``last``: (index of the prompt, its last output) of each."""
        self.num_prompt = self.num_generated = self.num_cached = 0
        self._counted: dict[int, tuple[int, int, int]] = {}
        for prompt, output in last:
            self.put(prompt, output)

    def put(self, prompt: int, output: RequestOutput) -> None:
        """Count the newest output of a prompt instead of the one before; read no other."""
        before = self._counted.get(prompt, (0, 0, 0))
        now = (
            len(output.prompt_token_ids),
            output.num_generated_tokens,
            output.num_cached_tokens or 0,
        )
        self._counted[prompt] = now
        self.num_prompt += now[0] - before[0]
        self.num_generated += now[1] - before[1]
        self.num_cached += now[2] - before[2]


def without_tokens(choice: CompletionOutput) -> CompletionOutput:
    """Return the choice without its tokens: the client requested only the prompt."""
    return CompletionOutput(
        index=choice.index,
        text="",
        token_ids=(),
        logprobs=None if choice.logprobs is None else (),
        finish_reason=FinishReason.LENGTH,
    )
