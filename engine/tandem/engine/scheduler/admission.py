"""Checks that refuse a request before any work, and the making of its Requests; nothing is held."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from tandem.engine.config import EngineConfig
from tandem.engine.logits_processors import ProcessorClasses
from tandem.engine.request import Order, Request, RequestGroup
from tandem.engine.step import SeqId
from tandem.protocol.embeds import PromptEmbeds
from tandem.protocol.errors import InvalidParameter, Refusal, RefusalCode
from tandem.protocol.hashing import PromptContent
from tandem.protocol.ids import BlockHash
from tandem.protocol.outputs import Finish, finish_of, top_within
from tandem.protocol.pooling import NO_SAMPLING, ModelPooling, PoolingParams
from tandem.protocol.requests import EngineCoreRequest, Produce, check_token_ids
from tandem.protocol.sampling import SEED_BITS, seeded

_SEED_STEP = 0x9E3779B97F4A7C15
"""Odd number near 2**64 over the golden ratio, whose multiples spread over all seeds."""

MAX_PROMPT_LOGPROBS_BYTES = 48 << 20
"""Maximum bytes of one request's prompt logprobs, which are sent in one frame of at most 64 MiB."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the requests that this engine accepts."""

    max_model_len: int
    """Prompt and output tokens of one sequence: the model's context or all of the KV cache."""
    vocab_size: int
    max_logprobs: int
    hidden_size: int = 1 << 20
    pooling: ModelPooling = field(default_factory=ModelPooling)
    """Results of the model in addition to tokens."""
    processors: ProcessorClasses = field(default_factory=lambda: ProcessorClasses(()))
    """Classes that may change logits on request."""
    computes_whole: bool = False
    """Whether each prompt is computed in one step, as an encoder's is."""
    embeds_size: int | None = None
    """Values of each vector of a prompt of embeddings; None refuses such prompts."""
    max_held_embeds_bytes: int = 1 << 30

    @classmethod
    def of(cls, config: EngineConfig, max_model_len: int) -> Limits:
        """Return the limits of an engine whose KV cache holds sequences of ``max_model_len``
        tokens."""
        facts = config.facts
        return cls(
            max_model_len,
            facts.vocab_size,
            config.max_logprobs,
            facts.hidden_size,
            facts.pooling,
            ProcessorClasses(config.model.logits_processors),
            computes_whole=facts.encoder is not None,
            embeds_size=config.embeds_size,
            max_held_embeds_bytes=config.model.max_held_embeds_bytes,
        )


def admitted(request: EngineCoreRequest, limits: Limits) -> EngineCoreRequest | Refusal:
    """Return ``request`` with its ``pooling`` completed, or the reason to refuse it."""
    pooling = request.pooling
    try:
        if pooling is None:
            request.params.verify().verify_vocabulary(limits.vocab_size, limits.max_logprobs)
            limits.processors.check(request.params)
        _check_tokens("prompt_token_ids", request.prompt_token_ids, limits.vocab_size)
        _check_prompt_logprobs(request)
        _check_choices(request, limits.vocab_size)
        if request.prompt_embeds is not None and limits.embeds_size is not None:
            _check_embeds(request, request.prompt_embeds, limits.embeds_size)
        if pooling is not None:
            pooling = _pooling(request, pooling, limits)
    except InvalidParameter as error:
        return Refusal(code=RefusalCode.INVALID, message=str(error), param=error.param)
    if request.prompt_embeds is not None and limits.embeds_size is None:
        message = "prompts of embeddings are taken with --enable-prompt-embeds alone"
        return Refusal(code=RefusalCode.UNSUPPORTED, message=message, param="prompt_embeds")
    if request.adapter is not None:
        message = f"adapter {request.adapter!r} is not loaded here"
        return Refusal(code=RefusalCode.UNSUPPORTED, message=message, param="adapter")
    if request.pooling is None and not limits.pooling.generates:
        message = "this model gives vectors and scores, it has no head for tokens"
        return Refusal(code=RefusalCode.UNSUPPORTED, message=message, param="model")
    if request.kv is not None and request.pooling is not None:
        message = "a request that is pooled is not handed over: kv is for requests of tokens"
        return Refusal(code=RefusalCode.UNSUPPORTED, message=message, param="pooling")
    if request.kv is not None and not _shares_prefix(request):
        message = "choices that go on from different tokens are not handed over"
        return Refusal(code=RefusalCode.UNSUPPORTED, message=message, param="emitted")
    refusal = _length_refusal(request, limits.max_model_len)
    if refusal is not None or pooling is None:
        return refusal or request
    return msgspec.structs.replace(request, pooling=pooling)


def embeds_refusal(
    came: PromptContent | None, lives: Iterable[PromptContent | None], most: int
) -> Refusal | None:
    """Return a refusal if a prompt's content exceeds the bytes left. A single one of any size is
    accepted."""
    if came is None:
        return None
    held = sum(each.nbytes for each in lives if each is not None)
    if not held or held + came.nbytes <= most:
        return None
    message = f"{held} bytes of prompt_embeds are here; {came.nbytes} more pass {most}"
    return Refusal(code=RefusalCode.CAPACITY, message=message)


def _length_refusal(request: EngineCoreRequest, max_model_len: int) -> Refusal | None:
    """Return a refusal if the request is too long. A producer also holds emitted tokens, but does
    not know the consumer's limit."""
    count = len(request.prompt_token_ids)
    if isinstance(request.kv, Produce):
        count += max(map(len, request.emitted), default=0)
    if count < max_model_len or (request.pooling is not None and count == max_model_len):
        return None
    if request.pooling is not None:
        message = f"the prompt has {count} tokens, at most {max_model_len} fit here"
        return Refusal(code=RefusalCode.NEVER_FITS, message=message, param="prompt_token_ids")
    message = (
        f"the prompt has {count} tokens, and with at least one token of output "
        f"at most {max_model_len} fit here"
    )
    return Refusal(code=RefusalCode.NEVER_FITS, message=message, param="prompt_token_ids")


def _check_embeds(request: EngineCoreRequest, embeds: PromptEmbeds, hidden_size: int) -> None:
    embeds.verify_shape("prompt_embeds", hidden_size)
    if embeds.num_tokens != len(request.prompt_token_ids):
        allowed = f"a vector for each of {len(request.prompt_token_ids)} placeholders"
        raise InvalidParameter("prompt_embeds", embeds.shape_text, allowed)
    if request.pooling is not None:
        raise InvalidParameter("prompt_embeds", embeds.shape_text, "none with pooling")
    if request.params.prompt_logprobs is not None:
        asked = request.params.prompt_logprobs
        raise InvalidParameter(
            "prompt_logprobs", asked, "none with prompt_embeds, which has no ids"
        )


def _check_tokens(param: str, ids: list[int] | tuple[int, ...], vocab_size: int) -> None:
    if not ids:
        raise InvalidParameter(param, [], "at least one token id")
    check_token_ids(param, ids, vocab_size)


def _check_prompt_logprobs(request: EngineCoreRequest) -> None:
    top, count = request.params.prompt_logprobs, len(request.prompt_token_ids)
    if top is None:
        return
    most = top_within(MAX_PROMPT_LOGPROBS_BYTES, count)
    if most is None:
        allowed = f"none for a prompt of {count} tokens: one answer cannot hold them"
        raise InvalidParameter("prompt_logprobs", top, allowed)
    if top > most:
        allowed = f"at most {most} for each of the prompt's {count} tokens"
        raise InvalidParameter("prompt_logprobs", top, allowed)


def _check_choices(request: EngineCoreRequest, vocab_size: int) -> None:
    n = request.params.n
    if len(request.emitted) > n:
        raise InvalidParameter("emitted", len(request.emitted), f"at most n={n} choices")
    for tokens in request.emitted:
        if tokens:
            _check_tokens("emitted", tokens, vocab_size)
    if not request.finished_choices:
        return
    finished = set(request.finished_choices)
    if not finished <= set(range(n)):
        raise InvalidParameter("finished_choices", request.finished_choices, f"choices under {n}")
    if len(finished) == n:
        raise InvalidParameter("finished_choices", request.finished_choices, "one choice left")


def _pooling(request: EngineCoreRequest, pooling: PoolingParams, limits: Limits) -> PoolingParams:
    if msgspec.structs.replace(request.params, seed=None) != NO_SAMPLING:
        allowed = "those of NO_SAMPLING with pooling, which draws no token"
        raise InvalidParameter("params", request.params, allowed)
    if any(request.emitted):
        raise InvalidParameter("emitted", request.emitted, "none with pooling")
    num_tokens = len(request.prompt_token_ids)
    return limits.pooling.resolve(pooling, hidden_size=limits.hidden_size, num_tokens=num_tokens)


def open_choices(request: EngineCoreRequest) -> tuple[int, ...]:
    """Return the choices to continue."""
    choices = tuple(range(request.params.n))
    if not request.finished_choices:
        return choices
    return tuple(each for each in choices if each not in request.finished_choices)


def _shares_prefix(request: EngineCoreRequest) -> bool:
    choices = open_choices(request)
    return len(choices) == 1 or not any(request.emitted_of(choice) for choice in choices)


def end_of(source: EngineCoreRequest, max_model_len: int) -> int:
    """Return the tokens at which a choice ends by length. A producer uses the request's limit
    only."""
    asked = source.max_model_len
    if asked is None:
        return max_model_len
    return asked if isinstance(source.kv, Produce) else min(asked, max_model_len)


def requests_of(
    group: RequestGroup,
    *,
    priority: int,
    hashes: list[BlockHash],
    next_seq: Callable[[], SeqId],
) -> list[Request]:
    """Return one Request that will fork if all choices start alike, else one for each open
    choice."""
    source = group.source
    choices = open_choices(source)
    bundles = [choices] if _shares_prefix(source) else [(choice,) for choice in choices]
    num_prompt = len(source.prompt_token_ids)
    made = []
    for bundle in bundles:
        order: Order = (priority, group.turn, group.number, bundle[0])
        request = Request(
            next_seq(),
            group,
            bundle,
            token_ids=[*source.prompt_token_ids, *source.emitted_of(bundle[0])],
            num_prompt=num_prompt,
            order=order,
            max_len=longest(source, num_prompt, group.max_model_len),
            block_hashes=hashes.copy(),
        )
        made.append(request)
    return made


def longest(source: EngineCoreRequest, num_prompt: int, max_model_len: int) -> int:
    """Return the tokens of prompt and output at which a choice ends by length."""
    if source.params.max_tokens is None:
        return max_model_len
    return min(max_model_len, num_prompt + source.params.max_tokens)


def ended_before(request: Request) -> Finish | None:
    """Return the end of a forced prefix, if an earlier attempt ended with it unreported."""
    if request.num_output == 0:
        return None
    return finish_of(
        request.params,
        request.group.source.eos_token_ids,
        request.token_ids[-1],
        num_emitted=request.num_output,
        num_prompt=request.num_prompt,
        max_model_len=request.group.max_model_len,
    )


class SeedSource:
    """Seeds for requests without one, such as those of ``LLM``: all different and the same in each
    run."""

    def __init__(self, seed: int) -> None:
        self._next = seed * _SEED_STEP

    def seeded(self, request: EngineCoreRequest) -> EngineCoreRequest:
        if request.params.has_seed or request.pooling is not None:
            return request
        self._next += _SEED_STEP
        params = seeded(request.params, self._next % 2**SEED_BITS)
        return msgspec.structs.replace(request, params=params)
