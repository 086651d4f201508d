"""``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tandem.llm.outputs import CompletionOutput, RequestOutput
from tandem.llm.sampling import PreparedRequest
from tandem.protocol.errors import InvalidParameter
from tandem.protocol.sampling import OutputKind
from tandem.router.api.openai.answers.answer_reader import AnswerReader, ChatReader, reader_of
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
from tandem.router.api.openai.bodies.hints import note_ignored
from tandem.router.api.openai.bodies.schemas import ChatBody, StreamOptions, TokenizeBody
from tandem.router.api.openai.bodies.tools import is_forced
from tandem.router.api.openai.service import (
    Answer,
    Outputs,
    Service,
    begin_for,
    blaming,
    context_of,
    count_finished,
    event_stream,
    input_options,
    read,
    run,
    service_of,
)
from tandem.router.endpoints import Routes
from tandem.text.chat_template import ChatOptions

_EFFORT = frozenset({"reasoning_effort", "enable_thinking"})
"""Names of ``reasoning_effort`` in templates."""


def chat_options(body: ChatBody | TokenizeBody, service: Service) -> ChatOptions:
    """Return the options of a chat. Raises InvalidParameter."""
    if body.chat_template is not None and not service.trust_request_chat_template:
        raise InvalidParameter(
            "chat_template", body.chat_template, "leave it out: this server allows only the model's"
        )
    tools = body.tools or None
    forced = isinstance(body, ChatBody) and is_forced(body.tool_choice)
    if forced and not _reads_tools(body, service):
        tools = None  # a grammar enforces them without the template
    opens_turn = body.add_generation_prompt
    options = ChatOptions(
        add_generation_prompt=not body.continue_final_message if opens_turn is None else opens_turn,
        continue_final_message=bool(body.continue_final_message),
        chat_template=body.chat_template,
        template_kwargs={**_effort(body), **(body.chat_template_kwargs or {})},
        tools=tools,
        documents=body.documents if isinstance(body, ChatBody) else None,
    )
    _check_read(body, options, service)
    return options


def _reads_tools(body: ChatBody | TokenizeBody, service: Service) -> bool:
    if body.chat_template is not None:
        return True
    options = ChatOptions(tools=body.tools)
    return "tools" in service.llm.tokenizer.chat_templates.names_of(options)


def _effort(body: ChatBody | TokenizeBody) -> dict[str, Any]:
    effort = body.reasoning_effort if isinstance(body, ChatBody) else None
    if effort is None:
        return {}
    return {"reasoning_effort": effort, "enable_thinking": effort != "none"}


def _check_read(body: ChatBody | TokenizeBody, options: ChatOptions, service: Service) -> None:
    """Refuse arguments that the model's template does not read."""
    wanted: dict[str, tuple[object, frozenset[str]]] = {}
    if options.tools:
        wanted["tools"] = (body.tools, frozenset({"tools"}))
    if options.documents:
        wanted["documents"] = (options.documents, frozenset({"documents"}))
    says_effort = isinstance(body, ChatBody) and body.reasoning_effort not in (None, "none")
    if not (wanted or says_effort) or options.chat_template is not None:
        return
    names = service.llm.tokenizer.chat_templates.names_of(options)
    if isinstance(body, ChatBody) and says_effort and not names & _EFFORT:
        body.ignore(body.effort_name)
    for param, (value, readers) in wanted.items():
        if not names & readers:
            raise InvalidParameter(
                param, value, f"leave it out: this model's chat template does not read {param}"
            )


async def prepare_chat(
    service: Service,
    body: ChatBody,
    request: Request,
    reader: AnswerReader | None,
    messages: Sequence[dict[str, Any]] | None = None,
) -> PreparedRequest:
    """Prepare a chat of the body, or of ``messages``, without sending it.

    Raises InvalidParameter with a chat's parameter names.
    """
    kind = OutputKind.DELTA if body.stream or reader is not None else OutputKind.FINAL_ONLY
    options = input_options(body, request)
    if reader is not None:
        parsers = service.parsers
        options = replace(
            options,
            seen_special_ids=parsers.seen,
            reasoning=partial(parsers.span, continued=body.continued),
            thinks=parsers.thinks,
        )
    with blaming(body.client_names()):
        # Large bodies leave the loop: schemas of tools become a large schema.
        size: int = request.scope["state"]["body_bytes"]
        chat = chat_options(body, service)
        note_ignored(request.scope, body.ignored)
        sampling = await service.llm.cpu_pool.run(size, body.sampling)
        return await service.llm.prepare_chat(
            body.messages if messages is None else messages,
            {**sampling, **({} if reader is None else reader.form), "output_kind": kind},
            options=options,
            chat=chat,
        )


async def outputs_of(
    service: Service, body: ChatBody, request: Request, prepared: PreparedRequest
) -> Outputs:
    """Yield the model's outputs. Closing it aborts the request."""
    with blaming(body.client_names()):
        async with aclosing(run(service, [prepared], context_of(request))) as outputs:
            async for output in outputs:
                yield output


async def chat_outputs(
    service: Service, body: ChatBody, request: Request, reader: AnswerReader | None
) -> Outputs:
    """Prepare a chat and yield its outputs, without generators between."""
    prepared, context = await prepare_chat(service, body, request, reader), context_of(request)
    metrics = service.counters(context)
    with blaming(body.client_names()):
        async with aclosing(service.llm.stream(prepared, context)) as outputs:
            async for output in outputs:
                count_finished(metrics, output)
                yield 0, output


routes = Routes("OpenAI")


@routes.post("/v1/chat/completions")
async def create_chat_completion(request: Request) -> Response:
    """Return the model's answer to a chat."""
    body = await read(ChatBody, request)
    service = service_of(request)
    # Schemas of strict tools are read once for each form of a call.
    size: int = request.scope["state"]["body_bytes"]
    reader = await service.llm.cpu_pool.run(size, reader_of, body, service.parsers)
    answer = begin_for(request, body, "chatcmpl", service.model_name(body.model))
    if body.stream:
        return event_stream(service, request, _events(service, body, request, answer, reader))
    async with while_connected(request.receive):
        return await _whole(service, body, request, answer, reader)


def _echoed(body: ChatBody) -> str:
    """Return the continued text if ``echo`` is set, else ""."""
    is_said = body.messages[-1].get("role") == "assistant"
    return body.last_text if body.echo and is_said else ""


async def _whole(
    service: Service, body: ChatBody, request: Request, answer: Answer, reader: ChatReader | None
) -> Response:
    last: RequestOutput | None = None
    async with aclosing(chat_outputs(service, body, request, reader)) as outputs:
        async for _, output in outputs:
            last = output
            if reader is not None:
                for choice in output.outputs:
                    reader.take(output, choice)
    assert last is not None, "a stream without an error has an output"
    choices = last.outputs if reader is None else reader.choices.values()
    size = size_of(last.prompt_logprobs) + sum(size_of(each.logprobs) for each in choices)
    content = await service.llm.cpu_pool.run(size, _content, body, answer, last, reader)
    return Response(content, media_type="application/json")


def _content(
    body: ChatBody, answer: Answer, last: RequestOutput, reader: ChatReader | None
) -> bytes:
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
                    # Also without text: clients measure one chunk per step.
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
    usage_now = (
        usage(len(output.prompt_token_ids), 0, output.num_cached_tokens) if running else None
    )
    delta = {"role": "assistant", "content": _echoed(body)}
    content = b'"delta":' + msgspec.json.encode(delta)
    extras: dict[str, Any] = {}
    if body.return_token_ids:
        extras["prompt_token_ids"] = list(output.prompt_token_ids)
    if body.return_prompt_text:
        extras["prompt_text"] = output.prompt
    return b"".join(writer.raw(index, content, usage_now, extras) for index in range(body.n or 1))


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
