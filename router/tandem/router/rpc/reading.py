"""Messages of gRPC as the bodies that HTTP has: the same checks then see the same fields."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from tandem.protocol.errors import InvalidParameter
from tandem.protocol.sampling import ExtraArg
from tandem.router.openai.bodies.body import Body
from tandem.router.openai.bodies.bounds import SMALL_BYTES, understand
from tandem.router.openai.bodies.pooling_schemas import EmbeddingBody, ScoreBody
from tandem.router.openai.bodies.reading import Reading
from tandem.router.openai.bodies.schemas import ChatBody, CompletionBody, TokenizeBody
from tandem.router.openai.service import Service
from tandem.router.rpc import tandem_pb2 as pb
from tandem.router.rpc.call import Call

_LISTS = ("stop", "stop_token_ids", "allowed_token_ids", "bad_words")
_AnyBody = TypeVar("_AnyBody", bound=Body)
_AnyRequest = TypeVar("_AnyRequest")
_AnyValue = TypeVar("_AnyValue")
_ENTRY_WEIGHT = 17
"""Cost of a nested message as it becomes a field, for ``Beside``: it takes 0.4 to 1.1 us, and two
bytes may be one message."""
_INPUTS = "one of prompt, tokens, prompt_embeds and chat"


async def generation_body(
    service: Service, request: pb.GenerateRequest, call: Call
) -> ChatBody | CompletionBody:
    """Return the body of a Generate call. Raises InvalidParameter."""
    model = ChatBody if request.WhichOneof("input") == "chat" else CompletionBody
    # Of what goes beside the loop for its bytes, nobody looks at the entries one by one here.
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
    """Return the body of an Embed call. Raises InvalidParameter."""
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
    """Return the body of a Score call. Raises InvalidParameter."""
    return await _understood(service, call, ScoreBody, _score_fields, request, 0)


def _score_fields(request: pb.ScoreRequest) -> dict[str, Any]:
    sides = {"text_1": list(request.text_1), "text_2": list(request.text_2)}
    return {**_common(request), **sides}


async def tokenize_body(service: Service, request: pb.TokenizeRequest, call: Call) -> TokenizeBody:
    """Return the body of a Tokenize call. Raises InvalidParameter."""
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
    """Return the body of a request with ``entries`` messages; then release its bytes."""
    beside = service.llm.beside
    size = max(call.num_taken, _ENTRY_WEIGHT * entries)
    body = await beside.run(size, _encoded, fields_of, request)
    size = len(body) if len(body) > SMALL_BYTES else 0
    reading = Reading(service.unknown_fields)
    found = await beside.run(size, understand, model, body, service.bounds, reading)
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
    """Return the value. Raises InvalidParameter for a number that JSON cannot express."""
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
