"""State that the endpoints share, and their first steps."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import (
    AsyncGenerator,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from tandem.llm.async_llm import AsyncLLM
from tandem.llm.outputs import CompletionOutput, RequestOutput
from tandem.llm.sampling import PreparedRequest
from tandem.protocol.context import RequestContext
from tandem.protocol.errors import InvalidParameter, RequestRefused
from tandem.protocol.outputs import FinishReason
from tandem.router.api.openai.answers.sse import ClientGone, EventStream, KeepAlives
from tandem.router.api.openai.bodies.bounds import SMALL_BYTES, Body, RequestBounds, understand
from tandem.router.api.openai.bodies.embeds import EmbedsIntake
from tandem.router.api.openai.bodies.hints import Reading, UnknownFields, note_ignored
from tandem.router.api.openai.bodies.pooling_schemas import PooledBody
from tandem.router.api.openai.bodies.schemas import GenerationBody
from tandem.router.http.errors import HttpProblem, body_too_slow, unknown_model
from tandem.router.http.middleware import MAX_REQUEST_ID, is_request_id
from tandem.router.metrics import RouterMetrics
from tandem.text.input_processor import InputOptions, TruncationSide
from tandem.text.parsers.model import ModelParsers
from tandem.text.prompts import Prompt
from tandem.tracing.recording import current, marked

MAX_CACHE_SALT = 1024
MAX_PRIORITY = 2**31 - 1
MAX_TIMEOUT = 86_400.0
"""Maximum of a client's deadline in seconds."""
TIMEOUT_HEADER = "X-Request-Timeout"

_AnyBody = TypeVar("_AnyBody", bound=Body)


class Identified(Protocol):
    """Body that may name its request."""

    request_id: str | None


@dataclass(slots=True)
class Service:
    """State of an app, at ``app.state.service``."""

    llm: AsyncLLM
    metrics: RouterMetrics
    canary_metrics: RouterMetrics
    names: Callable[[], tuple[str, ...]]
    """Names of the model; empty while none is known."""
    body_seconds: float
    stream_seconds: float
    """Maximum seconds to write a stream, including the client's delays."""
    bounds: RequestBounds
    is_served: Callable[[], bool]
    """Returns whether a decode worker is up, and its card known."""
    parsers: ModelParsers = field(default_factory=ModelParsers)
    """Parsers of reasoning and calls."""
    trust_request_chat_template: bool = False
    allow_request_priority: bool = False
    max_parallel_prompts: int = 64
    embeds: EmbedsIntake = field(default_factory=EmbedsIntake)
    unknown_fields: UnknownFields = field(default_factory=UnknownFields)
    keep_alives: KeepAlives = field(default_factory=lambda: KeepAlives(0.0))
    """Comments in silent streams."""

    def counters(self, context: RequestContext) -> RouterMetrics:
        """Return the metrics that count a request."""
        return self.metrics if context.route is None else self.canary_metrics

    def model_name(self, asked: str | None) -> str:
        """Return the name for the answer. Raises HttpProblem 404."""
        names = self.names()
        if asked is None:
            return names[0] if names else ""
        if names and asked not in names:
            raise unknown_model(asked)
        return asked


async def read(model: type[_AnyBody], request: Request) -> _AnyBody:
    """Return the body as ``model``. Raises HttpProblem, InvalidParameter, ClientGone."""
    service = service_of(request)
    with marked("read body"):
        body = await read_body(request)
    size = len(body) if len(body) > SMALL_BYTES else 0
    request.scope["state"]["body_bytes"] = size
    reading = Reading(service.unknown_fields)
    with marked("parse"):
        parsed = await service.llm.cpu_pool.run(
            size, understand, model, body, service.bounds, reading
        )
    note_ignored(request.scope, reading.ignored)
    return parsed


async def read_body(request: Request) -> bytes:
    """Return the whole body. Raises HttpProblem (408) if it is too slow, ClientGone."""
    seconds = service_of(request).body_seconds
    try:
        async with asyncio.timeout(seconds):
            # request.body() would keep the bytes for as long as the answer takes.
            return b"".join([part async for part in request.stream()])
    except TimeoutError as error:
        raise HttpProblem(body_too_slow(seconds)) from error
    except ClientDisconnect as error:
        raise ClientGone("the client left while it was sending") from error


def service_of(request: Request) -> Service:
    """Return the app's service."""
    service: Service = request.app.state.service
    return service


def context_of(request: Request) -> RequestContext:
    """Return the context that middleware made for a request."""
    state: dict[str, Any] = request.scope["state"]
    route = state.get("route")
    return RequestContext(
        arrived=state["arrived"],
        route=route,
        # A canary reads from its headers which workers have answered.
        tells_accepted=route is None
        and bool(state.get("streams"))
        and service_of(request).keep_alives.are_sent,
    )


def event_stream(
    service: Service, request: Request, events: AsyncGenerator[bytes, None]
) -> EventStream:
    """Return the answer that sends ``events``."""
    return EventStream(
        events,
        seconds=service.stream_seconds,
        gone=service.counters(context_of(request)).request_cancelled,
        keep_alives=service.keep_alives,
    )


def checked_id(param: str, value: str) -> str:
    """Return a client's id. Raises InvalidParameter."""
    if not is_request_id(value):
        raise InvalidParameter(param, value, f"1 to {MAX_REQUEST_ID} printable ASCII characters")
    return value


def request_id_of(request: Request, body: Identified) -> str:
    """Return the client's id (header first, then body), or a new one.

    It is a name, not a key: several calls may have the same.
    """
    state: dict[str, Any] = request.scope["state"]
    given = request.headers.get("x-request-id")
    param, value = ("X-Request-Id", given) if given else ("request_id", body.request_id)
    if value is not None:
        state["request_id"] = checked_id(param, value)
        recording = current()
        if recording is not None:
            recording.request_id = value
    request_id: str = state["request_id"]
    return request_id


def note_answer(request: Request, answer_id: str) -> None:
    """Note the id of a request's answer, by which it may be aborted."""
    request.scope["state"]["answer_id"] = answer_id


def input_options(body: GenerationBody | PooledBody, request: Request) -> InputOptions:
    """Return the options of a body and the deadline header."""
    options = options_of(body, service_of(request))
    given = request.headers.get(TIMEOUT_HEADER)
    if given is None:
        return options
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    limits = [each for each in (_budget(TIMEOUT_HEADER, seconds), options.budget_ms) if each]
    return replace(options, budget_ms=min(limits))


def options_of(body: GenerationBody | PooledBody, service: Service) -> InputOptions:
    """Return the options of a body."""
    if body.cache_salt is not None and len(body.cache_salt) > MAX_CACHE_SALT:
        raise InvalidParameter(
            "cache_salt", body.cache_salt, f"a text of at most {MAX_CACHE_SALT} characters"
        )
    side = TruncationSide(body.truncation_side) if body.truncation_side else None
    return InputOptions(
        add_special_tokens=body.add_special_tokens,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        truncation_side=side,
        cache_salt=body.cache_salt,
        priority=_priority(body.priority or 0, service),
        budget_ms=None if body.timeout is None else _budget("timeout", body.timeout),
        partial_on_timeout=isinstance(body, GenerationBody) and bool(body.partial_on_timeout),
    )


def _budget(param: str, seconds: float) -> int:
    """Return a client's deadline in milliseconds. Raises InvalidParameter."""
    if not 0.001 <= seconds <= MAX_TIMEOUT:
        allowed = f"seconds, 0.001 to {MAX_TIMEOUT:g}"
        raise InvalidParameter(param, None if math.isnan(seconds) else seconds, allowed)
    return int(seconds * 1000)


def _priority(asked: int, service: Service) -> int:
    """Return the client's priority, if clients may set one."""
    if asked and not service.allow_request_priority:
        raise InvalidParameter(
            "priority", asked, "0: priorities of requests are disabled on this server"
        )
    if not -MAX_PRIORITY - 1 <= asked <= MAX_PRIORITY:
        raise InvalidParameter(
            "priority", asked, f"an integer from {-MAX_PRIORITY - 1} to {MAX_PRIORITY}"
        )
    return asked


@contextmanager
def blaming(names: Mapping[str, str]) -> Iterator[None]:
    """Rename parameters in errors raised within."""
    try:
        yield
    except InvalidParameter as error:
        error.param = names.get(error.param, error.param)
        for ours, theirs in names.items():
            error.allowed = re.sub(rf"(?<![-\w]){ours}\b", theirs, error.allowed)
        raise
    except RequestRefused as error:
        refusal = error.refusal
        if refusal.param is None or refusal.param not in names:
            raise
        param = names[refusal.param]
        message = refusal.message.replace(f"{refusal.param}:", f"{param}:", 1)
        blamed = msgspec.structs.replace(refusal, message=message, param=param)
        raise RequestRefused(blamed) from error


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
    """Return the frame of a new answer."""
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
    """Prepare prompts in order, and let other requests run in between.

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
    """Yield the outputs of all prompts. Closing it aborts them."""
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
    """Count the choices that end with this output."""
    for choice in output.outputs:
        if choice.finish_reason is not None:
            metrics.choice_finished(choice.finish_reason)


class Totals:
    """Usage over all prompts of a call so far."""

    __slots__ = ("_counted", "num_cached", "num_generated", "num_prompt")

    def __init__(self, last: Iterable[tuple[int, RequestOutput]] = ()) -> None:
        """``last``: (index of the prompt, its last output)."""
        self.num_prompt = self.num_generated = self.num_cached = 0
        self._counted: dict[int, tuple[int, int, int]] = {}
        for prompt, output in last:
            self.put(prompt, output)

    def put(self, prompt: int, output: RequestOutput) -> None:
        """Replace the output of a prompt by a newer one."""
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
    """Return the choice without tokens, if only the prompt was requested."""
    return CompletionOutput(
        index=choice.index,
        text="",
        token_ids=(),
        logprobs=None if choice.logprobs is None else (),
        finish_reason=FinishReason.LENGTH,
    )
