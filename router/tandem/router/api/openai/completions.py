"""``POST /v1/completions``: one prompt or a batch, as text or token ids."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tandem.llm.async_llm import AsyncLLM
from tandem.llm.cpu_pool import weight
from tandem.llm.outputs import CompletionOutput, RequestOutput
from tandem.llm.sampling import PreparedRequest
from tandem.protocol.sampling import OutputKind
from tandem.router.api.openai.answers.chunks import (
    DONE,
    ChunkWriter,
    completion_logprobs,
    completion_writer,
    joined,
    prompt_logprobs,
    size_of,
    usage,
)
from tandem.router.api.openai.answers.sse import COMMENT, while_connected
from tandem.router.api.openai.bodies.schemas import CompletionBody, StreamOptions
from tandem.router.api.openai.service import (
    Answer,
    Outputs,
    Service,
    Totals,
    begin_for,
    blaming,
    context_of,
    event_stream,
    input_options,
    prepare_all,
    read,
    run,
    service_of,
    without_tokens,
)
from tandem.router.endpoints import Routes
from tandem.text.output_processor import AnswerOffsets, EchoedPrompt
from tandem.text.prompts import Prompt, parse_prompts
from tandem.text.tokenizer import Tokenizer


class Choices:
    """Choices of one call."""

    def __init__(
        self, tokenizer: Tokenizer, body: CompletionBody, echoed: Sequence[EchoedPrompt]
    ) -> None:
        """``echoed`` is one per prompt, or nothing without echo."""
        self._tokenizer = tokenizer
        self._body = body
        self._echoed = echoed
        self._offsets: dict[int, AnswerOffsets] = {}
        self._shown: dict[int, int] = {}
        """Rendered characters of each choice."""

    def index(self, prompt: int, choice: CompletionOutput) -> int:
        """Return the index of a choice over all prompts."""
        return prompt * (self._body.n or 1) + choice.index

    def is_first(self, prompt: int, choice: CompletionOutput) -> bool:
        return self.index(prompt, choice) not in self._shown

    def shown(self, choice: CompletionOutput) -> CompletionOutput:
        """Return the choice, without tokens if only the prompt is requested."""
        return without_tokens(choice) if self._body.prompt_only else choice

    def render(
        self, prompt: int, choice: CompletionOutput, output: RequestOutput
    ) -> tuple[str, dict[str, Any] | None]:
        """Return text and logprobs, after the echoed prompt at the beginning."""
        index = self.index(prompt, choice)
        echoed = self._echoed[prompt] if self._echoed and index not in self._shown else None
        text = choice.text if echoed is None else echoed.text + choice.text
        self._shown[index] = self._shown.get(index, 0) + len(text)
        if choice.logprobs is None:
            return text, None
        logprobs = completion_logprobs(choice.logprobs, self._places(prompt, choice, output))
        if echoed is None:
            return text, logprobs
        first = self._tokenizer.token_text(output.prompt_token_ids[0])
        before = completion_logprobs(output.prompt_logprobs or [], echoed.offsets, first)
        return text, joined(before, logprobs)

    def _places(self, prompt: int, choice: CompletionOutput, output: RequestOutput) -> list[int]:
        """Return the text offsets of tokens, at most the end of an ended text."""
        index = self.index(prompt, choice)
        if index not in self._offsets:
            self._offsets[index] = AnswerOffsets(
                self._tokenizer,
                skip_special_tokens=self._body.skip_special_tokens is not False,
                context=self._tokenizer.letter if output.is_embeds else output.prompt_token_ids,
                start=len(self._echoed[prompt].text) if self._echoed else 0,
            )
        ids = choice.token_ids[: len(choice.logprobs or ())]
        places = self._offsets[index].place(ids)
        if choice.finish_reason is None:
            return places
        return [min(place, self._shown[index]) for place in places]


async def choices_of(
    llm: AsyncLLM, body: CompletionBody, prepared: Sequence[PreparedRequest]
) -> Choices:
    """Return the choices of a new call."""
    echoed = [await _echoed(llm, body, each) for each in prepared] if body.echo else []
    return Choices(llm.tokenizer, body, echoed)


async def _echoed(llm: AsyncLLM, body: CompletionBody, prepared: PreparedRequest) -> EchoedPrompt:
    """Return a prompt as it is shown, with offsets for log-probabilities only.

    An uncut text is not tokenized again.
    """
    text = prepared.processed.prompt
    if text is not None and body.logprobs is None and body.truncate_prompt_tokens is None:
        return EchoedPrompt(text, [])
    return await llm.echo(prepared)


routes = Routes("OpenAI")


@routes.post("/v1/completions")
async def create_completion(request: Request) -> Response:
    """Return the model's continuation of each prompt."""
    body = await read(CompletionBody, request)
    service = service_of(request)
    answer = begin_for(request, body, "cmpl", service.model_name(body.model))
    if body.stream:
        return event_stream(service, request, _events(service, body, request, answer))
    async with while_connected(request.receive):
        return await _whole(service, body, request, answer)


async def prompts_of(service: Service, body: CompletionBody, embeds: list[str]) -> list[Prompt]:
    """Return prompts of embeddings first, then the rest.

    An empty ``prompt`` next to embeddings is ignored: clients must send one.
    """
    prompts: list[Prompt] = [*await service.embeds.read(embeds, service.llm.cpu_pool)]
    if not prompts or body.prompt:
        cpu_pool = service.llm.cpu_pool
        prompts += await cpu_pool.run(weight(body.prompt), parse_prompts, body.prompt)
    return prompts


async def _prepare(
    service: Service, body: CompletionBody, request: Request, embeds: list[str]
) -> list[PreparedRequest]:
    prompts = await prompts_of(service, body, embeds)
    kind = OutputKind.DELTA if body.stream else OutputKind.FINAL_ONLY
    options = input_options(body, request)
    with blaming(body.client_names()):
        params = {**body.sampling(), "output_kind": kind}
        return await prepare_all(service.llm, prompts, params, options)


async def _outputs(
    service: Service, body: CompletionBody, request: Request, prepared: list[PreparedRequest]
) -> Outputs:
    with blaming(body.client_names()):
        async with aclosing(run(service, prepared, context_of(request))) as outputs:
            async for output in outputs:
                yield output


async def _whole(
    service: Service, body: CompletionBody, request: Request, answer: Answer
) -> Response:
    embeds = body.take_embeds()
    with service.embeds.holding(embeds):
        prepared = await _prepare(service, body, request, embeds)
        choices = await choices_of(service.llm, body, prepared)
        async with aclosing(_outputs(service, body, request, prepared)) as outputs:
            last = {prompt: output async for prompt, output in outputs}
    assert len(last) == len(prepared), "a stream without an error has an output"
    size = sum(
        size_of(choice.logprobs) + size_of(output.prompt_logprobs)
        for output in last.values()
        for choice in output.outputs
    )
    content = await service.llm.cpu_pool.run(size, _content, choices, body, answer, last)
    return Response(content, media_type="application/json")


def _content(
    choices: Choices, body: CompletionBody, answer: Answer, last: dict[int, RequestOutput]
) -> bytes:
    rendered = [
        _choice(choices, prompt, choices.shown(choice), last[prompt], body)
        for prompt in sorted(last)
        for choice in last[prompt].outputs
    ]
    content = {
        "id": answer.id,
        "object": "text_completion",
        "created": answer.created,
        "model": answer.model,
        "choices": rendered,
        "usage": _usage(Totals(last.items()), body),
        "system_fingerprint": None,
    }
    return msgspec.json.encode(content)


def _choice(
    choices: Choices,
    prompt: int,
    choice: CompletionOutput,
    output: RequestOutput,
    body: CompletionBody,
) -> dict[str, Any]:
    text, logprobs = choices.render(prompt, choice, output)
    scored = None if body.prompt_logprobs is None else output.prompt_logprobs
    return {
        "index": choices.index(prompt, choice),
        "text": text,
        "logprobs": logprobs,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
        "token_ids": list(choice.token_ids) if body.return_token_ids else None,
        "prompt_logprobs": prompt_logprobs(scored),
        "prompt_token_ids": _prompt_ids(output) if body.return_token_ids else None,
    }


def _prompt_ids(output: RequestOutput) -> list[int] | None:
    return None if output.is_embeds else list(output.prompt_token_ids)


def _usage(totals: Totals, body: CompletionBody) -> dict[str, Any]:
    generated = 0 if body.prompt_only else totals.num_generated
    return usage(totals.num_prompt, generated, totals.num_cached)


async def _events(
    service: Service, body: CompletionBody, request: Request, answer: Answer
) -> AsyncGenerator[bytes, None]:
    embeds = body.take_embeds()
    with service.embeds.holding(embeds):
        prepared = await _prepare(service, body, request, embeds)
        choices = await choices_of(service.llm, body, prepared)
        options = body.stream_options or StreamOptions()
        running = bool(options.continuous_usage_stats)
        writer = completion_writer(
            stream_id=answer.id,
            created=answer.created,
            model=answer.model,
            says_usage=bool(options.include_usage),
        )
        extra = body.echo or body.logprobs is not None or body.return_token_ids or running
        totals, counts = Totals(), running or bool(options.include_usage)
        async with aclosing(_outputs(service, body, request, prepared)) as outputs:
            async for prompt, output in outputs:
                if not output.outputs:
                    yield COMMENT
                    continue
                if counts:
                    totals.put(prompt, output)
                for choice in output.outputs:
                    if extra or choice.finish_reason is not None:
                        usage_now = _usage(totals, body) if running else None
                        echoes = body.echo and choices.is_first(prompt, choice)
                        size = size_of(output.prompt_logprobs) if echoes else 0
                        chunk = (writer, choices, prompt, choice, output, body, usage_now)
                        yield await service.llm.cpu_pool.run(size, _chunk, *chunk)
                    else:
                        # Also without text: clients measure one chunk per step.
                        yield writer.text(choices.index(prompt, choice), choice.text)
    if options.include_usage:
        yield writer.last_usage(_usage(totals, body))
    yield DONE


def _chunk(
    writer: ChunkWriter,
    choices: Choices,
    prompt: int,
    choice: CompletionOutput,
    output: RequestOutput,
    body: CompletionBody,
    usage_now: dict[str, Any] | None,
) -> bytes:
    choice = choices.shown(choice)
    extras: dict[str, Any] = {}
    if body.return_token_ids:
        if choices.is_first(prompt, choice):
            extras["prompt_token_ids"] = _prompt_ids(output)
        extras["token_ids"] = list(choice.token_ids)
    text, logprobs = choices.render(prompt, choice, output)
    return writer.full(
        choices.index(prompt, choice),
        text,
        logprobs=logprobs,
        finish=choice.finish_reason,
        stop_reason=choice.stop_reason,
        extras=extras,
        usage=usage_now,
    )
