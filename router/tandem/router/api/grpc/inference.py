"""Methods of ``tandem.v1.Inference``, on the service that HTTP uses."""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from dataclasses import replace
from typing import Any, TypeVar

import msgspec

from tandem.llm.outputs import (
    CompletionOutput,
    PooledRequestOutput,
    PositionLogprobs,
    RequestOutput,
)
from tandem.llm.sampling import PreparedRequest
from tandem.llm.scoring import Side, prepare_scores
from tandem.protocol.context import RequestContext
from tandem.protocol.errors import InvalidParameter
from tandem.protocol.link import tandem_version
from tandem.protocol.pooling import PoolingParams
from tandem.protocol.sampling import ExtraArg, OutputKind
from tandem.router.api.grpc import tandem_pb2 as pb
from tandem.router.api.grpc.call import Call, Calls
from tandem.router.api.openai.bodies.bounds import SMALL_BYTES, Body, understand
from tandem.router.api.openai.bodies.hints import Reading
from tandem.router.api.openai.bodies.pooling_schemas import EmbeddingBody, PooledBody, ScoreBody
from tandem.router.api.openai.bodies.schemas import ChatBody, CompletionBody, TokenizeBody
from tandem.router.api.openai.chat import chat_options
from tandem.router.api.openai.completions import prompts_of
from tandem.router.api.openai.pooled import PooledCall
from tandem.router.api.openai.service import (
    Service,
    begin,
    blaming,
    checked_id,
    count_finished,
    options_of,
)
from tandem.text.input_processor import InputOptions

_LISTS = ("stop", "stop_token_ids", "allowed_token_ids", "bad_words")
_AnyBody = TypeVar("_AnyBody", bound=Body)
_AnyRequest = TypeVar("_AnyRequest")
_AnyValue = TypeVar("_AnyValue")
_ENTRY_WEIGHT = 17
"""Cost of a nested message as it becomes a field, for ``CpuPool``."""
_INPUTS = "one of prompt, tokens, prompt_embeds and chat"


async def generation_body(
    service: Service, request: pb.GenerateRequest, call: Call
) -> ChatBody | CompletionBody:
    """Return the body of a Generate call."""
    model = ChatBody if request.WhichOneof("input") == "chat" else CompletionBody
    # Large messages leave the loop for their bytes; their entries need not be counted.
    entries = 0 if call.num_taken > SMALL_BYTES else _num_entries(request)
    return await _understood(service, call, model, _generation_fields, request, entries)


def _num_entries(request: pb.GenerateRequest) -> int:
    sampling = request.sampling
    extras = sum(1 + len(each.values) for each in sampling.vllm_xargs.values())
    return len(request.chat.messages) + len(sampling.logit_bias) + extras


def _generation_fields(request: pb.GenerateRequest) -> dict[str, Any]:
    fields = {**_common(request), **_sampling(request.sampling)}
    fields["stream"] = request.stream
    if request.HasField("priority"):
        fields["priority"] = request.priority
    if request.HasField("cache_salt"):
        fields["cache_salt"] = request.cache_salt
    if request.HasField("add_special_tokens"):
        fields["add_special_tokens"] = request.add_special_tokens
    wanted = fields.pop("logprobs", None)
    match request.WhichOneof("input"):
        case "chat":
            fields["messages"] = _messages(request.chat)
            if wanted is not None:
                fields |= {"logprobs": True, "top_logprobs": wanted}
            return fields
        case "prompt":
            fields["prompt"] = request.prompt
        case "tokens":
            fields["prompt"] = list(request.tokens.ids)
        case "prompt_embeds":
            if not request.prompt_embeds:
                raise InvalidParameter("prompt_embeds", b"", "bytes of a saved tensor")
            fields["prompt_embeds"] = request.prompt_embeds  # in base64 from here on
        case _:
            raise InvalidParameter("input", None, _INPUTS)
    if wanted is not None:
        fields["logprobs"] = wanted
    return fields


async def embedding_body(service: Service, request: pb.EmbedRequest, call: Call) -> EmbeddingBody:
    """Return the body of an Embed call."""
    entries = len(request.tokens)
    return await _understood(service, call, EmbeddingBody, _embedding_fields, request, entries)


def _embedding_fields(request: pb.EmbedRequest) -> dict[str, Any]:
    fields = _common(request)
    if bool(request.input) is bool(request.tokens):
        raise InvalidParameter("input", len(request.input), "texts, or tokens in their place")
    fields["input"] = list(request.input) or [list(each.ids) for each in request.tokens]
    for name in ("dimensions", "normalize"):
        if request.HasField(name):
            fields[name] = getattr(request, name)
    return fields


async def score_body(service: Service, request: pb.ScoreRequest, call: Call) -> ScoreBody:
    """Return the body of a Score call."""
    return await _understood(service, call, ScoreBody, _score_fields, request, 0)


def _score_fields(request: pb.ScoreRequest) -> dict[str, Any]:
    sides = {"text_1": list(request.text_1), "text_2": list(request.text_2)}
    return {**_common(request), **sides}


async def tokenize_body(service: Service, request: pb.TokenizeRequest, call: Call) -> TokenizeBody:
    """Return the body of a Tokenize call."""
    entries = len(request.chat.messages)
    return await _understood(service, call, TokenizeBody, _tokenize_fields, request, entries)


def _tokenize_fields(request: pb.TokenizeRequest) -> dict[str, Any]:
    fields: dict[str, Any] = {"model": request.model or None}
    if request.HasField("add_special_tokens"):
        fields["add_special_tokens"] = request.add_special_tokens
    match request.WhichOneof("input"):
        case "chat":
            fields["messages"] = _messages(request.chat)
        case "prompt":
            fields["prompt"] = request.prompt
        case _:
            raise InvalidParameter("input", None, "one of prompt and chat")
    return fields


async def _understood(
    service: Service,
    call: Call,
    model: type[_AnyBody],
    fields_of: Callable[[_AnyRequest], dict[str, Any]],
    request: _AnyRequest,
    entries: int,
) -> _AnyBody:
    cpu_pool = service.llm.cpu_pool
    size = max(call.num_taken, _ENTRY_WEIGHT * entries)
    body = await cpu_pool.run(size, _encoded, fields_of, request)
    size = len(body) if len(body) > SMALL_BYTES else 0
    reading = Reading(service.unknown_fields)
    found = await cpu_pool.run(size, understand, model, body, service.bounds, reading)
    call.let_go()
    return found


def _encoded(fields_of: Callable[[_AnyRequest], dict[str, Any]], request: _AnyRequest) -> bytes:
    return msgspec.json.encode(fields_of(request))


def _common(request: pb.GenerateRequest | pb.EmbedRequest | pb.ScoreRequest) -> dict[str, Any]:
    fields: dict[str, Any] = {"model": request.model or None}
    if request.request_id:
        fields["request_id"] = request.request_id
    if request.HasField("truncate_prompt_tokens"):
        fields["truncate_prompt_tokens"] = request.truncate_prompt_tokens
    return fields


def _messages(chat: pb.Chat) -> list[dict[str, str]]:
    return [{"role": each.role, "content": each.content} for each in chat.messages]


def _sampling(params: pb.SamplingParams) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for field, value in params.ListFields():
        if field.name in _LISTS:
            fields[field.name] = list(value)
        elif field.name == "logit_bias":
            fields[field.name] = {
                str(token): _finite(f"logit_bias.{token}", bias) for token, bias in value.items()
            }
        elif field.name == "structured_outputs":
            fields[field.name] = _form(value)
        elif field.name == "vllm_xargs":
            fields[field.name] = {name: _extra(name, each) for name, each in value.items()}
        else:
            fields[field.name] = _finite(field.name, value)
    return fields


def _finite(name: str, value: _AnyValue) -> _AnyValue:
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidParameter(name, value, "a finite number")
    return value


def _extra(name: str, given: pb.ExtraArg) -> ExtraArg:
    kinds = [each.WhichOneof("value") for each in given.values]
    param = f"vllm_xargs.{name[:80]}"
    found = [
        _finite(param, getattr(each, kind))
        for each, kind in zip(given.values, kinds, strict=True)
        if kind
    ]
    if len(found) == len(kinds) and (given.is_list or len(found) == 1):
        return found if given.is_list else found[0]
    allowed = "one text, integer or number, or a list of them with is_list"
    raise InvalidParameter(param, kinds[:8], allowed)


def _form(wanted: pb.StructuredOutputs) -> dict[str, Any]:
    name = wanted.WhichOneof("form")
    if name is None:
        return {}
    return {name: list(wanted.choice.choice) if name == "choice" else getattr(wanted, name)}


def step_message(request_id: str, output: RequestOutput) -> bytes:
    """Return new parts of each choice, and the usage at the end."""
    message = pb.GenerateResponse(request_id=request_id)
    for choice in output.outputs:
        _add_choice(message, choice)
    if output.finished:
        message.usage.prompt_tokens = len(output.prompt_token_ids)
        message.usage.completion_tokens = output.num_generated_tokens
        message.usage.cached_tokens = output.num_cached_tokens or 0
    return message.SerializeToString()


def pooled_usage(outputs: Iterable[PooledRequestOutput]) -> pb.Usage:
    """Return the usage of prompts that were pooled."""
    usage = pb.Usage()
    for each in outputs:
        usage.prompt_tokens += len(each.prompt_token_ids)
        usage.cached_tokens += each.num_cached_tokens
    return usage


def _add_choice(message: pb.GenerateResponse, choice: CompletionOutput) -> None:
    added = message.choices.add(index=choice.index, text=choice.text, token_ids=choice.token_ids)
    if choice.logprobs is not None:
        added.logprobs.extend(_position(each) for each in choice.logprobs)
    if choice.finish_reason is not None:
        added.finish_reason = choice.finish_reason
    if choice.stop_reason is not None:
        added.stop_reason = str(choice.stop_reason)


def _position(logprobs: PositionLogprobs) -> pb.PositionLogprobs:
    return pb.PositionLogprobs(
        tokens=[
            pb.TokenLogprob(id=token_id, logprob=each.logprob)
            for token_id, each in logprobs.items()
        ]
    )


class Inference:
    """The methods. The server converts their errors to statuses."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._calls = Calls()

    async def generate(
        self, request: pb.GenerateRequest, context: Call
    ) -> AsyncGenerator[bytes, None]:
        service, request_id = self._service, _id_of(request.request_id)
        with self._calls.running(request_id, context):
            body = await generation_body(service, request, context)
            service.model_name(body.model)
            kind = OutputKind.DELTA if request.stream else OutputKind.FINAL_ONLY
            options = replace(options_of(body, service), budget_ms=_budget(context))
            embeds = body.take_embeds() if isinstance(body, CompletionBody) else []
            with blaming(body.client_names()), service.embeds.holding(embeds):
                prepared = await self._prepared(body, kind, options, embeds)
                came = RequestContext(arrived=context.arrived)
                counters = service.counters(came)
                async with aclosing(service.llm.stream(prepared, came)) as outputs:
                    async for output in outputs:
                        count_finished(counters, output)
                        yield step_message(request_id, output)

    async def _prepared(
        self,
        body: ChatBody | CompletionBody,
        kind: OutputKind,
        options: InputOptions,
        embeds: list[str],
    ) -> PreparedRequest:
        service, params = self._service, {**body.sampling(), "output_kind": kind}
        if isinstance(body, CompletionBody):
            (prompt,) = await prompts_of(service, body, embeds)
            return await service.llm.prepare(prompt, params, options=options)
        parsers = service.parsers
        options = replace(
            options,
            seen_special_ids=parsers.seen,
            reasoning=parsers.span,
            thinks=parsers.thinks,
        )
        chat = chat_options(body, service)
        return await service.llm.prepare_chat(body.messages, params, options=options, chat=chat)

    async def embed(self, request: pb.EmbedRequest, context: Call) -> pb.EmbedResponse:
        request_id = _id_of(request.request_id)
        with self._calls.running(request_id, context):
            body = await embedding_body(self._service, request, context)
            call = self._pooled(request_id, body, context)
            params = PoolingParams(dimensions=body.dimensions, normalize=body.normalize)
            outputs = await call.pool(await call.prepare(body.input, params))
            response = pb.EmbedResponse(usage=pooled_usage(outputs))
            for each in outputs:
                response.data.add().values.extend(each.floats)
                await asyncio.sleep(0)
            return response

    async def score(self, request: pb.ScoreRequest, context: Call) -> pb.ScoreResponse:
        request_id = _id_of(request.request_id)
        with self._calls.running(request_id, context):
            body = await score_body(self._service, request, context)
            call = self._pooled(request_id, body, context)
            sides = [Side(body.text_1, "text_1"), Side(body.text_2, "text_2")]
            for side in sides:
                call.bound(side.param, side.texts)
            prepared = await prepare_scores(call.service.llm, *sides, options=call.options)
            scored, outputs = await prepared.scores(call.pool)
            scores = [each.outputs.score for each in scored]
            return pb.ScoreResponse(scores=scores, usage=pooled_usage(outputs))

    def _pooled(self, request_id: str, body: PooledBody, context: Call) -> PooledCall:
        service = self._service
        answer = begin("rpc", request_id, service.model_name(body.model))
        options = replace(options_of(body, service), budget_ms=_budget(context))
        return PooledCall(service, answer, RequestContext(arrived=context.arrived), options)

    async def tokenize(self, request: pb.TokenizeRequest, call: Call) -> pb.TokenizeResponse:
        service = self._service
        body = await tokenize_body(service, request, call)
        service.model_name(body.model)
        if body.prompt is None:
            ids = await service.llm.encode_chat(
                body.messages or [],
                chat_options(body, service),
                add_special_tokens=bool(body.add_special_tokens),
            )
        else:
            special = body.add_special_tokens is not False
            ids = await service.llm.encode(body.prompt, add_special_tokens=special)
        return pb.TokenizeResponse(tokens=ids)

    async def abort(self, request: pb.AbortRequest, context: Call) -> pb.AbortResponse:
        request_id = checked_id("request_id", request.request_id)
        return pb.AbortResponse(aborted=self._calls.abort(request_id, context))

    async def get_model_info(self, _: pb.GetModelInfoRequest, __: Call) -> pb.ModelInfo:
        card = await self._service.llm.card()
        return pb.ModelInfo(
            names=self._service.names(),
            max_model_len=card.max_model_len,
            vocab_size=card.vocab_size,
            pools=card.pooling is not None,
            version=tandem_version(),
        )


def _id_of(given: str) -> str:
    return checked_id("request_id", given) if given else uuid.uuid4().hex


def _budget(context: Call) -> int | None:
    if context.deadline is None:
        return None
    return max(1, int(1000 * (context.deadline - context.arrived)))
