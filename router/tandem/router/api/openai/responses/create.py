"""``POST /v1/responses``."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Iterator,
    Sequence,
)
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tandem.llm.outputs import CompletionOutput, RequestOutput
from tandem.llm.sampling import PreparedRequest
from tandem.protocol.errors import InvalidParameter
from tandem.router.api.openai.answers.answer_reader import AnswerReader, check_calls
from tandem.router.api.openai.answers.chunks import chat_logprobs
from tandem.router.api.openai.answers.sse import end_with, while_connected
from tandem.router.api.openai.bodies.bounds import too_many
from tandem.router.api.openai.bodies.schemas import ChatBody
from tandem.router.api.openai.chat import outputs_of, prepare_chat
from tandem.router.api.openai.responses.body import NAMES, ResponsesBody
from tandem.router.api.openai.responses.items import messages_of
from tandem.router.api.openai.responses.store import (
    Turn,
    earlier_items,
    encoded,
    not_stored,
    size_of,
    store_of,
)
from tandem.router.api.openai.responses.writer import ResponseWriter
from tandem.router.api.openai.service import (
    Service,
    blaming,
    event_stream,
    note_answer,
    read,
    request_id_of,
    service_of,
)
from tandem.router.endpoints import Routes
from tandem.router.tenant import current_tenant
from tandem.text.errors import ContextLengthExceeded


def frame_of(body: ResponsesBody, response_id: str, model: str, created: int) -> dict[str, Any]:
    """Return the response without the answer's fields; absent fields are null.

    Large values are encoded once, for several events and the store.
    """
    wanted = None if body.text is None else body.text.format
    text = (
        {"type": "text"} if wanted is None else wanted.model_dump(by_alias=True, exclude_none=True)
    )
    tools = [tool.model_dump(include=set(type(tool).model_fields)) for tool in body.tools or ()]
    effort = None if body.reasoning is None else body.reasoning.effort
    return {
        "id": response_id,
        "object": "response",
        "created_at": created,
        "completed_at": None,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": _raw(body.instructions),
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "model": model,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": effort, "summary": None},
        "safety_identifier": body.safety_identifier,
        "prompt_cache_key": body.prompt_cache_key,
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": body.temperature,
        "text": _raw({"format": text}),
        "tool_choice": body.tool_choice or "auto",
        "tools": _raw(tools),
        "top_logprobs": body.top_logprobs,
        "top_p": body.top_p,
        "truncation": body.truncation or "disabled",
        "user": body.user,
    }


def _raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


def usage_of(output: RequestOutput, num_reasoning: int | None) -> dict[str, Any]:
    """Return the tokens of a response."""
    num_prompt, num_generated = len(output.prompt_token_ids), output.num_generated_tokens
    return {
        "input_tokens": num_prompt,
        "input_tokens_details": {
            "cached_tokens": output.num_cached_tokens or 0,
            "cache_write_tokens": 0,
        },
        "output_tokens": num_generated,
        "output_tokens_details": {"reasoning_tokens": num_reasoning or 0},
        "total_tokens": num_prompt + num_generated,
    }


_Prepared = TypeVar("_Prepared")
Prepare = Callable[[Sequence[dict[str, Any]]], Awaitable[_Prepared]]


async def fitting(messages: Sequence[dict[str, Any]], prepare: Prepare[_Prepared]) -> _Prepared:
    """Return ``prepare``'s result for the longest end of the chat that fits.

    It begins with a user's message; instructions stay. Raises ContextLengthExceeded if the last
    turn does not fit. Halves the number of turns at each attempt.
    """
    try:
        return await prepare(messages)
    except ContextLengthExceeded as error:
        too_long = error
    start = next((at for at, each in enumerate(messages) if not _instructs(each)), 0)
    begins = [at for at, each in enumerate(messages) if at > start and each.get("role") == "user"]
    found: _Prepared | None = None
    low, high = 0, len(begins)
    while low < high:
        middle = (low + high) // 2
        try:
            found = await prepare([*messages[:start], *messages[begins[middle] :]])
            high = middle
        except ContextLengthExceeded as error:
            too_long, low = error, middle + 1
    if found is None:
        raise too_long
    return found


def _instructs(message: dict[str, Any]) -> bool:
    return message.get("role") in ("system", "developer")


routes = Routes("OpenAI")

_FUNCTION = re.compile(r"^(tools\[\d+\])\.function\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One call and its chat."""

    service: Service
    request: Request
    body: ResponsesBody
    response_id: str
    chat: ChatBody
    reader: AnswerReader
    writer: ResponseWriter
    before: Turn | None
    """Turn of the response that this one continues."""
    inputs: bytes
    """Items of the body, encoded for the store."""


@routes.post("/v1/responses")
async def create_response(request: Request) -> Response:
    """Return the model's answer to a conversation, as items."""
    body = await read(ResponsesBody, request)
    service = service_of(request)
    model = service.model_name(body.model)
    asked = await _understand(service, request, body, model)
    note_answer(request, asked.response_id)
    if body.stream:
        end_with(request.scope, asked.writer.failed)
        return event_stream(service, request, _events(asked))
    async with while_connected(request.receive):
        return await _whole(asked)


async def _understand(service: Service, request: Request, body: ResponsesBody, model: str) -> Asked:
    request_id_of(request, body)
    before = _before(request, body)
    size: int = request.scope["state"]["body_bytes"] + size_of(before)
    return await service.llm.cpu_pool.run(size, _understood, service, request, body, before, model)


def _understood(
    service: Service, request: Request, body: ResponsesBody, before: Turn | None, model: str
) -> Asked:
    most = service.bounds.entries["messages"]
    items = earlier_items(before)
    if len(items) + len(body.items) > most:
        raise too_many("input", [*items, *body.items], most)
    messages = messages_of(body.instructions, items, body.items)
    # Never the client's id: anyone with a response's id may read it.
    response_id = f"resp_{secrets.token_hex(24)}"
    with _in_own_words():
        chat = body.chat(messages)
        check_calls(chat, service.parsers)
    frame = frame_of(body, response_id, model, int(time.time()))
    return Asked(
        service=service,
        request=request,
        body=body,
        response_id=response_id,
        chat=chat,
        reader=AnswerReader(chat, service.parsers),
        writer=ResponseWriter(frame, streams=bool(body.stream)),
        before=before,
        inputs=encoded(body.items),
    )


def _before(request: Request, body: ResponsesBody) -> Turn | None:
    if body.previous_response_id is None:
        return None
    found = store_of(request).get(current_tenant.get().id, body.previous_response_id)
    if found is None:
        raise not_stored(body.previous_response_id, "previous_response_id")
    return found.turn


async def _prepare(asked: Asked) -> PreparedRequest:
    async def prepared(messages: Sequence[dict[str, Any]]) -> PreparedRequest:
        return await prepare_chat(asked.service, asked.chat, asked.request, asked.reader, messages)

    if asked.body.truncation == "auto":
        return await fitting(asked.chat.messages, prepared)
    return await prepared(asked.chat.messages)


async def _read(
    asked: Asked,
) -> AsyncGenerator[tuple[bytes, RequestOutput, CompletionOutput | None], None]:
    begun = False
    with _in_own_words():
        prepared = await _prepare(asked)
        outputs = outputs_of(asked.service, asked.chat, asked.request, prepared)
        async with aclosing(outputs):
            async for _, output in outputs:
                if not output.outputs:
                    begun = True
                    yield asked.writer.begin(), output, None
                for choice in output.outputs:
                    opening = b"" if begun else asked.writer.begin()
                    begun = True
                    logprobs = chat_logprobs(choice.logprobs)
                    events = asked.reader.read(output, choice)
                    data = await asked.service.llm.cpu_pool.run(
                        asked.writer.weight_of(events),
                        asked.writer.take,
                        events,
                        logprobs["content"] if logprobs else (),
                    )
                    yield opening + data, output, choice


async def _whole(asked: Asked) -> Response:
    last: tuple[RequestOutput, CompletionOutput] | None = None
    async with aclosing(_read(asked)) as steps:
        async for _, output, choice in steps:
            if choice is not None:
                last = output, choice
    assert last is not None, "a stream without an error has an output"
    content = (await _end(asked, *last))[0]
    return Response(content, media_type="application/json")


async def _events(asked: Asked) -> AsyncGenerator[bytes, None]:
    last: tuple[RequestOutput, CompletionOutput] | None = None
    async with aclosing(_read(asked)) as steps:
        async for events, output, choice in steps:
            if events:
                yield events
            if choice is not None:
                last = output, choice
    assert last is not None, "a stream without an error has an output"
    yield (await _end(asked, *last))[1]


async def _end(
    asked: Asked, output: RequestOutput, choice: CompletionOutput
) -> tuple[bytes, bytes]:
    """Return the whole response as JSON, which is stored now, and the last events."""
    cpu_pool = asked.service.llm.cpu_pool
    ended = await cpu_pool.run(asked.writer.end_weight, _ended, asked, output, choice)
    content, events, outputs = ended
    if asked.body.store is not False:
        turn = Turn(asked.before, asked.inputs, outputs)
        tenant = current_tenant.get().id
        store_of(asked.request).put(tenant, asked.response_id, content, turn)
    return content, events


def _ended(
    asked: Asked, output: RequestOutput, choice: CompletionOutput
) -> tuple[bytes, bytes, bytes]:
    usage = usage_of(output, asked.reader.num_reasoning)
    events = asked.writer.end(choice.finish_reason, usage)
    content = msgspec.json.encode(asked.writer.final)
    return content, events, b"" if asked.body.store is False else encoded(asked.writer.output)


@contextmanager
def _in_own_words() -> Iterator[None]:
    try:
        with blaming(NAMES):
            yield
    except InvalidParameter as error:
        error.param = _FUNCTION.sub(r"\1", error.param)
        raise
