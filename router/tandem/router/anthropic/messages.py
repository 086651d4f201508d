"""``POST /v1/messages`` and ``POST /v1/messages/count_tokens``."""

from __future__ import annotations

import re
import secrets
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tandem.llm.outputs import CompletionOutput, RequestOutput
from tandem.protocol.errors import InvalidParameter
from tandem.router.anthropic.body import NAMES, CountBody, MessagesBody
from tandem.router.anthropic.writer import MessageWriter, stop_of, usage_of
from tandem.router.endpoints import Routes
from tandem.router.openai.answers.answer_reader import AnswerReader, check_calls
from tandem.router.openai.answers.last_words import end_with
from tandem.router.openai.answers.sse import while_connected
from tandem.router.openai.bodies.reading import note_ignored
from tandem.router.openai.bodies.schemas import ChatBody
from tandem.router.openai.chat_options import chat_options
from tandem.router.openai.chat_run import chat_outputs
from tandem.router.openai.service import (
    Service,
    blaming,
    event_stream,
    note_answer,
    read,
    service_of,
)

routes = Routes("Anthropic")

_RENAMED = (
    (re.compile(r"^(tools\[\d+\])\.function\.parameters\b"), r"\1.input_schema"),
    (re.compile(r"^(tools\[\d+\])\.function\b"), r"\1"),
    (re.compile(r"^stop\b"), "stop_sequences"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One call, understood."""

    service: Service
    request: Request
    chat: ChatBody
    reader: AnswerReader
    writer: MessageWriter
    max_tokens: int


@routes.post("/v1/messages")
async def create_message(request: Request) -> Response:
    """The model's answer to messages, as blocks."""
    body = await read(MessagesBody, request)
    service = service_of(request)
    model = service.model_name(body.model)
    size: int = request.scope["state"]["body_bytes"]
    chat, reader = await service.llm.beside.run(size, _understood, body, service)
    request_id: str = request.scope["state"]["request_id"]
    message_id = f"msg_{secrets.token_hex(16)}"
    note_answer(request, message_id)
    writer = MessageWriter(message_id, model, request_id, streams=bool(body.stream))
    asked = Asked(
        service=service,
        request=request,
        chat=chat,
        reader=reader,
        writer=writer,
        max_tokens=body.max_tokens,
    )
    if body.stream:
        end_with(request.scope, writer.failed)
        return event_stream(service, request, _events(asked, body))
    async with while_connected(request.receive):
        return await _whole(asked, body)


@routes.post("/v1/messages/count_tokens")
async def count_tokens(request: Request) -> Response:
    """Count the tokens of messages without an answer."""
    body = await read(CountBody, request)
    service = service_of(request)
    service.model_name(body.model)
    size: int = request.scope["state"]["body_bytes"]
    with _in_own_words(body):
        chat = await service.llm.beside.run(size, body.chat)
        options = chat_options(chat, service)
        note_ignored(request.scope, chat.ignored)
        tokens = await service.llm.encode_chat(chat.messages, options)
    content = msgspec.json.encode({"input_tokens": len(tokens)})
    return Response(content, media_type="application/json")


def _understood(body: MessagesBody, service: Service) -> tuple[ChatBody, AnswerReader]:
    """Return a body's chat, and the reader of its answer; may take long for a large body."""
    with _in_own_words(body):
        chat = body.chat()
        check_calls(chat, service.parsers)
        return chat, AnswerReader(chat, service.parsers)


async def _read(
    asked: Asked, body: CountBody
) -> AsyncGenerator[tuple[bytes, RequestOutput, CompletionOutput | None], None]:
    """Yield events and the outputs that they are from. Closing it aborts the request."""
    begun = False
    with _in_own_words(body):
        outputs = chat_outputs(asked.service, asked.chat, asked.request, asked.reader)
        async with aclosing(outputs):
            async for _, output in outputs:
                if not output.outputs:
                    begun = True
                    yield asked.writer.begin(output), output, None
                for choice in output.outputs:
                    opening = b"" if begun else asked.writer.begin(output)
                    begun = True
                    said = asked.writer.take(asked.reader.read(output, choice))
                    yield opening + said, output, choice


async def _whole(asked: Asked, body: CountBody) -> Response:
    """Return one JSON object."""
    last: tuple[RequestOutput, CompletionOutput] | None = None
    async with aclosing(_read(asked, body)) as steps:
        async for _, output, choice in steps:
            if choice is not None:
                last = output, choice
    assert last is not None, "a stream that ends without an error has said something"
    ending = _ending(asked, *last)
    asked.writer.end(*ending)
    content = msgspec.json.encode(asked.writer.message(*ending))
    return Response(content, media_type="application/json")


async def _events(asked: Asked, body: CountBody) -> AsyncGenerator[bytes, None]:
    last: tuple[RequestOutput, CompletionOutput] | None = None
    async with aclosing(_read(asked, body)) as steps:
        async for said, output, choice in steps:
            if said:
                yield said
            if choice is not None:
                last = output, choice
    assert last is not None, "a stream that ends without an error has said something"
    yield asked.writer.end(*_ending(asked, *last))


def _ending(
    asked: Asked, output: RequestOutput, choice: CompletionOutput
) -> tuple[str, str | None, dict[str, Any]]:
    num_calls = asked.reader.choice(choice.index).num_calls
    stop = stop_of(choice, output, num_calls=num_calls, max_tokens=asked.max_tokens)
    return *stop, usage_of(output, asked.reader.num_reasoning)


@contextmanager
def _in_own_words(body: CountBody) -> Iterator[None]:
    """Rename parameters in the chat's errors as messages do."""
    names = dict(NAMES)
    if body.output_config is None or body.output_config.effort is None:
        names["reasoning_effort"] = "thinking.type"
    try:
        with blaming(names):
            yield
    except InvalidParameter as error:
        for pattern, theirs in _RENAMED:
            error.param = pattern.sub(theirs, error.param)
        raise
