"""``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tandem.llm.outputs import CompletionOutput, RequestOutput
from tandem.router.api.openai.answers.chat_reader import ChatReader, reader_of
from tandem.router.api.openai.answers.chunks import (
    DONE,
    ChunkWriter,
    chat_logprobs,
    chat_writer,
    prompt_logprobs,
    size_of,
    usage,
)
from tandem.router.api.openai.answers.sse import while_connected
from tandem.router.api.openai.bodies.schemas import ChatBody, StreamOptions
from tandem.router.api.openai.chat_run import chat_outputs
from tandem.router.api.openai.generate import Answer, begin_for
from tandem.router.api.openai.service import Service, event_stream, read, service_of
from tandem.router.endpoints import Routes

routes = Routes("OpenAI")


@routes.post("/v1/chat/completions")
async def create_chat_completion(request: Request) -> Response:
    """The model's answer to a chat."""
    body = await read(ChatBody, request)
    service = service_of(request)
    # Schemas of strict tools are walked through here, once for each form of a call.
    size: int = request.scope["state"]["body_bytes"]
    reader = await service.llm.cpu_pool.run(size, reader_of, body, service.parsers)
    answer = begin_for(request, body, "chatcmpl", service.model_name(body.model))
    if body.stream:
        return event_stream(service, request, _events(service, body, request, answer, reader))
    async with while_connected(request.receive):
        return await _whole(service, body, request, answer, reader)


def _echoed(body: ChatBody) -> str:
    """Return the last message's text that the answer continues, if ``echo`` is set; else ""."""
    is_said = body.messages[-1].get("role") == "assistant"
    return body.last_text if body.echo and is_said else ""


async def _whole(
    service: Service, body: ChatBody, request: Request, answer: Answer, reader: ChatReader | None
) -> Response:
    """Return one JSON object."""
    last: RequestOutput | None = None
    async with aclosing(chat_outputs(service, body, request, reader)) as outputs:
        async for _, output in outputs:
            last = output
            if reader is not None:
                for choice in output.outputs:
                    reader.take(output, choice)
    assert last is not None, "a stream that ends without an error has said something"
    said = last.outputs if reader is None else reader.choices.values()
    size = size_of(last.prompt_logprobs) + sum(size_of(each.logprobs) for each in said)
    content = await service.llm.cpu_pool.run(size, _content, body, answer, last, reader)
    return Response(content, media_type="application/json")


def _content(
    body: ChatBody, answer: Answer, last: RequestOutput, reader: ChatReader | None
) -> bytes:
    """Return the whole answer; with log-probabilities it takes long."""
    echoed = _echoed(body)
    content = {
        "id": answer.id,
        "object": "chat.completion",
        "created": answer.created,
        "model": answer.model,
        "choices": [_choice(each, echoed, body) for each in last.outputs]
        if reader is None
        else [_read_choice(reader, index, echoed, body) for index in sorted(reader.choices)],
        "usage": _usage(last, reader),
        "system_fingerprint": None,
        "prompt_logprobs": prompt_logprobs(last.prompt_logprobs),
        "prompt_token_ids": list(last.prompt_token_ids) if body.return_token_ids else None,
        "prompt_text": last.prompt if body.return_prompt_text else None,
    }
    return msgspec.json.encode(content)


def _choice(choice: CompletionOutput, echoed: str, body: ChatBody) -> dict[str, Any]:
    message = {"role": "assistant", "content": echoed + choice.text, "refusal": None}
    return {
        "index": choice.index,
        "message": message,
        "logprobs": chat_logprobs(choice.logprobs),
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
        "token_ids": list(choice.token_ids) if body.return_token_ids else None,
    }


def _read_choice(reader: ChatReader, index: int, echoed: str, body: ChatBody) -> dict[str, Any]:
    read, kept = reader.choice(index), reader.choices[index]
    return {
        "index": index,
        "message": reader.message(kept, echoed),
        "logprobs": chat_logprobs(kept.logprobs),
        "finish_reason": read.finish,
        "stop_reason": None if read.last is None else read.last.stop_reason,
        "token_ids": kept.token_ids if body.return_token_ids else None,
    }


async def _events(
    service: Service, body: ChatBody, request: Request, answer: Answer, reader: ChatReader | None
) -> AsyncGenerator[bytes, None]:
    """Yield chunks, the usage if it is requested, and the end."""
    options = body.stream_options or StreamOptions()
    running = bool(options.continuous_usage_stats)
    writer = chat_writer(
        stream_id=answer.id,
        created=answer.created,
        model=answer.model,
        says_usage=bool(options.include_usage),
    )
    plain = not (body.logprobs or body.return_token_ids or running or reader)
    last: RequestOutput | None = None
    async with aclosing(chat_outputs(service, body, request, reader)) as outputs:
        async for _, output in outputs:
            if last is None:
                yield _first(writer, output, body, running=running)
            last = output
            for choice in output.outputs:
                if plain and choice.finish_reason is None:
                    # Also without text: a chunk a step is what clients take the time of.
                    yield writer.text(choice.index, choice.text)
                elif reader is None:
                    yield _chunk(writer, choice, output, body, running=running)
                else:
                    yield _read_chunk(writer, choice, output, body, reader, running=running)
    if options.include_usage and last is not None:
        yield writer.last_usage(_usage(last, reader))
    yield DONE


def _usage(output: RequestOutput, reader: ChatReader | None = None) -> dict[str, Any]:
    return usage(
        len(output.prompt_token_ids),
        output.num_generated_tokens,
        output.num_cached_tokens,
        None if reader is None else reader.num_reasoning,
    )


def _read_chunk(
    writer: ChunkWriter,
    choice: CompletionOutput,
    output: RequestOutput,
    body: ChatBody,
    reader: ChatReader,
    *,
    running: bool,
) -> bytes:
    delta = reader.take(output, choice)
    return writer.delta(
        choice.index,
        delta,
        logprobs=chat_logprobs(choice.logprobs),
        finish=reader.choice(choice.index).finish,
        stop_reason=choice.stop_reason,
        extras={"token_ids": list(choice.token_ids)} if body.return_token_ids else None,
        usage=_usage(output, reader) if running else None,
    )


def _first(writer: ChunkWriter, output: RequestOutput, body: ChatBody, *, running: bool) -> bytes:
    """Return the role of every choice, and the echoed text."""
    said = usage(len(output.prompt_token_ids), 0, output.num_cached_tokens) if running else None
    delta = {"role": "assistant", "content": _echoed(body)}
    content = b'"delta":' + msgspec.json.encode(delta)
    extras: dict[str, Any] = {}
    if body.return_token_ids:
        extras["prompt_token_ids"] = list(output.prompt_token_ids)
    if body.return_prompt_text:
        extras["prompt_text"] = output.prompt
    return b"".join(writer.raw(index, content, said, extras) for index in range(body.n or 1))


def _chunk(
    writer: ChunkWriter,
    choice: CompletionOutput,
    output: RequestOutput,
    body: ChatBody,
    *,
    running: bool,
) -> bytes:
    return writer.full(
        choice.index,
        choice.text,
        logprobs=chat_logprobs(choice.logprobs),
        finish=choice.finish_reason,
        stop_reason=choice.stop_reason,
        extras={"token_ids": list(choice.token_ids)} if body.return_token_ids else None,
        usage=_usage(output) if running else None,
    )
