"""``POST /v1/messages`` and ``POST /v1/messages/count_tokens``."""

from __future__ import annotations

import re
import secrets
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tandem.llm.outputs import CompletionOutput, RequestOutput
from tandem.protocol.errors import InvalidParameter
from tandem.protocol.outputs import FinishReason
from tandem.router.api.anthropic.body import NAMES, CountBody, MessagesBody
from tandem.router.api.openai.answers.answer_reader import AnswerReader, check_calls
from tandem.router.api.openai.answers.sse import end_with, while_connected
from tandem.router.api.openai.bodies.hints import note_ignored
from tandem.router.api.openai.bodies.schemas import ChatBody
from tandem.router.api.openai.chat import chat_options, chat_outputs
from tandem.router.api.openai.service import (
    Service,
    blaming,
    event_stream,
    note_answer,
    read,
    service_of,
)
from tandem.router.endpoints import Routes
from tandem.router.http.errors import ErrorAnswer, error_object
from tandem.text.parsers.events import (
    ArgumentsDelta,
    CallBegun,
    ContentDelta,
    Event,
    ReasoningDelta,
)

_encode = msgspec.json.Encoder().encode


class MessageWriter:
    """Writer of one answer's events."""

    def __init__(self, message_id: str, model: str, request_id: str, *, streams: bool) -> None:
        self._head = {"id": message_id, "type": "message", "role": "assistant", "model": model}
        self._request_id = request_id
        self._streams = streams
        self._out: list[bytes] = []
        self._texts: list[str] = []
        self._blocks: list[dict[str, Any]] = []
        self._is_open = False

    def begin(self, output: RequestOutput) -> bytes:
        usage = usage_of(output, None)
        self._emit("message_start", message=self.message(None, None, {**usage, "output_tokens": 0}))
        self._emit("ping")
        return self._flushed()

    def take(self, events: Iterable[Event]) -> bytes:
        for event in events:
            match event:
                case ContentDelta(text):
                    self._go_on("text", {"text": ""})
                    self._delta("text_delta", text=text)
                case ReasoningDelta(text):
                    self._go_on("thinking", {"thinking": "", "signature": ""})
                    self._delta("thinking_delta", thinking=text)
                case CallBegun(_, call_id, name):
                    self._begin("tool_use", {"id": call_id, "name": name, "input": {}})
                case ArgumentsDelta(_, text):
                    self._delta("input_json_delta", partial_json=text)
        return self._flushed()

    def end(self, reason: str, sequence: str | None, usage: dict[str, Any]) -> bytes:
        self._close()
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        self._emit("message_delta", delta=delta, usage=usage)
        self._emit("message_stop")
        return self._flushed()

    def failed(self, answer: ErrorAnswer) -> bytes:
        """Return the last event of a stream that fails."""
        self._put("error", error_object(answer, self._request_id))
        return self._flushed()

    def message(
        self, reason: str | None, sequence: str | None, usage: dict[str, Any]
    ) -> dict[str, Any]:
        stop = {"stop_reason": reason, "stop_sequence": sequence}
        return {**self._head, "content": list(self._blocks), **stop, "usage": usage}

    def _go_on(self, kind: str, fields: dict[str, Any]) -> None:
        if not self._is_open or self._blocks[-1]["type"] != kind:
            self._begin(kind, fields)

    def _begin(self, kind: str, fields: dict[str, Any]) -> None:
        self._close()
        block = {"type": kind, **fields}
        self._blocks.append(block)
        self._is_open = True
        self._emit("content_block_start", index=len(self._blocks) - 1, content_block=block)

    def _delta(self, kind: str, **fields: str) -> None:
        self._texts += fields.values()
        delta = {"type": kind, **fields}
        self._emit("content_block_delta", index=len(self._blocks) - 1, delta=delta)

    def _close(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        block, text = self._blocks[-1], "".join(self._texts)
        self._texts.clear()
        if block["type"] == "tool_use":
            block["input"] = _object(text)
        else:
            block[block["type"]] = text
        self._emit("content_block_stop", index=len(self._blocks) - 1)

    def _emit(self, kind: str, **fields: Any) -> None:
        if self._streams:
            self._put(kind, {"type": kind, **fields})

    def _put(self, kind: str, content: dict[str, Any]) -> None:
        self._out.append(b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode(content)))

    def _flushed(self) -> bytes:
        data = b"".join(self._out)
        self._out.clear()
        return data


def _object(text: str) -> dict[str, Any]:
    """Return the arguments of a call; {} unless the text is a JSON object."""
    try:
        found = msgspec.json.decode(text or "{}")
    except msgspec.DecodeError:
        return {}
    return found if isinstance(found, dict) else {}


def stop_of(
    choice: CompletionOutput, output: RequestOutput, *, num_calls: int, max_tokens: int
) -> tuple[str, str | None]:
    """Return the stop reason in Anthropic's terms, and the stop sequence."""
    if choice.finish_reason is not FinishReason.STOP:
        whole = output.num_generated_tokens >= max_tokens
        return "max_tokens" if whole else "model_context_window_exceeded", None
    if isinstance(choice.stop_reason, str):
        return "stop_sequence", choice.stop_reason
    return "tool_use" if num_calls else "end_turn", None


def usage_of(output: RequestOutput, num_reasoning: int | None) -> dict[str, Any]:
    """Return the tokens of a message, with cached ones separate."""
    num_cached = output.num_cached_tokens or 0
    details = {"output_tokens_details": {"thinking_tokens": num_reasoning}}
    return {
        "input_tokens": len(output.prompt_token_ids) - num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached,
        "output_tokens": output.num_generated_tokens,
        **({} if num_reasoning is None else details),
    }


routes = Routes("Anthropic")

_RENAMED = (
    (re.compile(r"^(tools\[\d+\])\.function\.parameters\b"), r"\1.input_schema"),
    (re.compile(r"^(tools\[\d+\])\.function\b"), r"\1"),
    (re.compile(r"^stop\b"), "stop_sequences"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One call and its chat."""

    service: Service
    request: Request
    chat: ChatBody
    reader: AnswerReader
    writer: MessageWriter
    max_tokens: int


@routes.post("/v1/messages")
async def create_message(request: Request) -> Response:
    """Return the model's answer to messages, as blocks."""
    body = await read(MessagesBody, request)
    service = service_of(request)
    model = service.model_name(body.model)
    size: int = request.scope["state"]["body_bytes"]
    chat, reader = await service.llm.cpu_pool.run(size, _understood, body, service)
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
        chat = await service.llm.cpu_pool.run(size, body.chat)
        options = chat_options(chat, service)
        note_ignored(request.scope, chat.ignored)
        tokens = await service.llm.encode_chat(chat.messages, options)
    content = msgspec.json.encode({"input_tokens": len(tokens)})
    return Response(content, media_type="application/json")


def _understood(body: MessagesBody, service: Service) -> tuple[ChatBody, AnswerReader]:
    with _in_own_words(body):
        chat = body.chat()
        check_calls(chat, service.parsers)
        return chat, AnswerReader(chat, service.parsers)


async def _read(
    asked: Asked, body: CountBody
) -> AsyncGenerator[tuple[bytes, RequestOutput, CompletionOutput | None], None]:
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
                    events = asked.writer.take(asked.reader.read(output, choice))
                    yield opening + events, output, choice


async def _whole(asked: Asked, body: CountBody) -> Response:
    last: tuple[RequestOutput, CompletionOutput] | None = None
    async with aclosing(_read(asked, body)) as steps:
        async for _, output, choice in steps:
            if choice is not None:
                last = output, choice
    assert last is not None, "a stream without an error has an output"
    ending = _ending(asked, *last)
    asked.writer.end(*ending)
    content = msgspec.json.encode(asked.writer.message(*ending))
    return Response(content, media_type="application/json")


async def _events(asked: Asked, body: CountBody) -> AsyncGenerator[bytes, None]:
    last: tuple[RequestOutput, CompletionOutput] | None = None
    async with aclosing(_read(asked, body)) as steps:
        async for events, output, choice in steps:
            if events:
                yield events
            if choice is not None:
                last = output, choice
    assert last is not None, "a stream without an error has an output"
    yield asked.writer.end(*_ending(asked, *last))


def _ending(
    asked: Asked, output: RequestOutput, choice: CompletionOutput
) -> tuple[str, str | None, dict[str, Any]]:
    num_calls = asked.reader.choice(choice.index).num_calls
    stop = stop_of(choice, output, num_calls=num_calls, max_tokens=asked.max_tokens)
    return *stop, usage_of(output, asked.reader.num_reasoning)


@contextmanager
def _in_own_words(body: CountBody) -> Iterator[None]:
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
