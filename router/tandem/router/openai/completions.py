"""``POST /v1/completions``: one prompt or a batch, as text or token ids."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from tandem.llm.async_llm import PreparedRequest
from tandem.llm.outputs import CompletionOutput, RequestOutput
from tandem.protocol.sampling import OutputKind
from tandem.router.openai.chunks import DONE, ChunkWriter, completion_writer, usage
from tandem.router.openai.generate import Answer, Totals, begin, run, without_tokens
from tandem.router.openai.logprobs import CompletionLogprobs, joined, prompt_logprobs
from tandem.router.openai.schemas import CompletionBody, StreamOptions, parse
from tandem.router.openai.service import (
    PlainRoute,
    Service,
    documented,
    input_options,
    read_body,
    request_id_of,
    service_of,
)
from tandem.router.openai.sse import EventStream, while_connected
from tandem.text.prompts import parse_prompts

routes = APIRouter(tags=["OpenAI"], route_class=PlainRoute)


@routes.post("/v1/completions", openapi_extra=documented(CompletionBody))
async def create_completion(request: Request) -> Response:
    """The model's continuation of each prompt."""
    body = parse(CompletionBody, await read_body(request))
    body.check()
    service = service_of(request)
    answer = begin("cmpl", request_id_of(request, body), service.model_name(body.model))
    if body.stream:
        events = _events(service, body, request, answer)
        gone = service.counters.request_cancelled
        return EventStream(events, seconds=service.stream_seconds, gone=gone)
    async with while_connected(request.receive):
        return await _whole(service, body, request, answer)


async def _prepare(
    service: Service, body: CompletionBody, request: Request
) -> list[PreparedRequest]:
    prompts = parse_prompts(body.prompt)
    kind = OutputKind.DELTA if body.stream else OutputKind.FINAL_ONLY
    params = {**body.sampling(), "output_kind": kind}
    request_id = request.scope["state"]["request_id"]
    options = input_options(body, request)
    return [
        await service.llm.prepare(
            prompt,
            params,
            request_id if len(prompts) == 1 else f"{request_id}-{index}",
            options=options,
        )
        for index, prompt in enumerate(prompts)
    ]


async def _echoed(
    service: Service, body: CompletionBody, prepared: Sequence[PreparedRequest]
) -> list[str]:
    """Text of each prompt with echo, else nothing."""
    if not body.echo:
        return [""] * len(prepared)
    return [
        each.processed.prompt
        if each.processed.prompt is not None
        else await service.llm.decode(each.processed.request.prompt_token_ids)
        for each in prepared
    ]


class Choices:
    """Renders choices of all prompts; keeps what goes on over the chunks of one."""

    def __init__(self, service: Service, body: CompletionBody, echoed: list[str]) -> None:
        self._token_text = service.llm.tokenizer.token_text
        self._body = body
        self._echoed = echoed
        self._logprobs: dict[int, CompletionLogprobs] = {}
        self._begun: set[int] = set()

    def index(self, prompt: int, choice: CompletionOutput) -> int:
        """Place of a choice among those of all prompts."""
        return prompt * (self._body.n or 1) + choice.index

    def render(
        self, prompt: int, choice: CompletionOutput, output: RequestOutput
    ) -> tuple[str, dict[str, Any] | None]:
        """Text and logprobs, the echoed prompt before the first of a choice."""
        index = self.index(prompt, choice)
        first = index not in self._begun
        self._begun.add(index)
        text = self._echoed[prompt] + choice.text if first else choice.text
        if choice.logprobs is None:
            return text, None
        logprobs = self._logprobs.setdefault(index, CompletionLogprobs())
        if not (first and self._body.echo):
            return text, logprobs.render(choice.logprobs)
        texts = [self._token_text(token) for token in output.prompt_token_ids[:1]]
        before = logprobs.render(output.prompt_logprobs or [], texts)
        return text, joined(before, logprobs.render(choice.logprobs))

    def shown(self, choice: CompletionOutput) -> CompletionOutput:
        """The choice, or none of it when only the prompt is wanted."""
        return without_tokens(choice) if self._body.prompt_only else choice


async def _whole(
    service: Service, body: CompletionBody, request: Request, answer: Answer
) -> Response:
    """One JSON object."""
    prepared = await _prepare(service, body, request)
    choices = Choices(service, body, await _echoed(service, body, prepared))
    async with aclosing(run(service.llm, prepared, service.counters)) as outputs:
        last = {prompt: output async for prompt, output in outputs}
    assert len(last) == len(prepared), "a stream that ends without an error has said something"
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
        "usage": _usage(list(last.values()), body),
        "system_fingerprint": None,
    }
    return Response(msgspec.json.encode(content), media_type="application/json")


def _choice(
    choices: Choices,
    prompt: int,
    choice: CompletionOutput,
    output: RequestOutput,
    body: CompletionBody,
) -> dict[str, Any]:
    text, logprobs = choices.render(prompt, choice, output)
    content: dict[str, Any] = {
        "index": choices.index(prompt, choice),
        "text": text,
        "logprobs": logprobs,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
    }
    if body.prompt_logprobs is not None:
        content["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
    if body.return_token_ids:
        content["token_ids"] = list(choice.token_ids)
        content["prompt_token_ids"] = list(output.prompt_token_ids)
    return content


def _usage(last: Sequence[RequestOutput], body: CompletionBody) -> dict[str, Any]:
    totals = Totals.of(last)
    generated = 0 if body.prompt_only else totals.num_generated
    return usage(totals.num_prompt, generated, totals.num_cached)


async def _events(
    service: Service, body: CompletionBody, request: Request, answer: Answer
) -> AsyncGenerator[bytes, None]:
    """Chunks, the usage if it is wanted, and the end."""
    prepared = await _prepare(service, body, request)
    choices = Choices(service, body, await _echoed(service, body, prepared))
    options = body.stream_options or StreamOptions()
    running = bool(options.continuous_usage_stats)
    writer = completion_writer(
        stream_id=answer.id,
        created=answer.created,
        model=answer.model,
        says_usage=bool(options.include_usage),
    )
    extra = body.echo or body.logprobs is not None or body.return_token_ids or running
    last: dict[int, RequestOutput] = {}
    async with aclosing(run(service.llm, prepared, service.counters)) as outputs:
        async for prompt, output in outputs:
            last[prompt] = output
            for choice in output.outputs:
                if extra or choice.finish_reason is not None:
                    said = _usage(list(last.values()), body) if running else None
                    yield _chunk(writer, choices, prompt, choice, output, body, said)
                elif choice.text:
                    yield writer.text(choices.index(prompt, choice), choice.text)
    if options.include_usage:
        yield writer.last_usage(_usage(list(last.values()), body))
    yield DONE


def _chunk(
    writer: ChunkWriter,
    choices: Choices,
    prompt: int,
    choice: CompletionOutput,
    output: RequestOutput,
    body: CompletionBody,
    said: dict[str, Any] | None,
) -> bytes:
    choice = choices.shown(choice)
    text, logprobs = choices.render(prompt, choice, output)
    return writer.full(
        choices.index(prompt, choice),
        text,
        logprobs=logprobs,
        finish=choice.finish_reason,
        stop_reason=choice.stop_reason,
        extras={"token_ids": list(choice.token_ids)} if body.return_token_ids else None,
        usage=said,
    )
