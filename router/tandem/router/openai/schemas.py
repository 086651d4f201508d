"""What clients may send: the shapes and types of bodies; ranges are the engine's to check.

Fields are OpenAI's, with vLLM's extensions that the engine has. null is the same as absent. What
is known but has no effect here is ignored; what would change the answer and is not built is
refused by name; a field that nobody knows is accepted, and logged once: clients carry extras of
other servers, and failing them would help nobody.
"""

from __future__ import annotations

import logging
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from tandem.protocol.errors import InvalidParameter
from tandem.router.openai.errors import of_validation

logger = logging.getLogger(__name__)

_IGNORED = frozenset(
    {
        *("user", "metadata", "store", "service_tier", "safety_identifier", "prediction"),
        *("prompt_cache_key", "prompt_cache_retention", "parallel_tool_calls", "verbosity"),
        *("reasoning_effort", "include_reasoning", "session_id"),
    }
)
_NOT_BUILT = {
    "functions": "function calling is not available",
    "function_call": "function calling is not available",
    "audio": "text only",
    "web_search_options": "not available",
    "structured_outputs": "structured output is not available",
    "guided_json": "structured output is not available",
    "guided_regex": "structured output is not available",
    "guided_choice": "structured output is not available",
    "guided_grammar": "structured output is not available",
    "use_beam_search": "beam search is not available",
    "prompt_embeds": "not available",
    "logprob_token_ids": "not available",
    "return_tokens_as_token_ids": "not available; see return_token_ids",
    "kv_transfer_params": "the router alone decides where KV goes",
}
_warned: set[str] = set()
_MAX_WARNED = 256


class Body(BaseModel):
    """A JSON body. Strict: a number in quotes is not a number, true is not 1."""

    model_config = ConfigDict(strict=True, extra="allow")

    def check_extras(self) -> None:
        """Refuse what is known and not built; log what is not known, once per name."""
        for name, value in (self.model_extra or {}).items():
            if name in _NOT_BUILT and value not in (None, False):
                raise InvalidParameter(name, value, f"leave it out: {_NOT_BUILT[name]}")
            if name in _IGNORED or name in _NOT_BUILT or name in _warned:
                continue
            if len(_warned) < _MAX_WARNED:
                _warned.add(name)
                logger.warning("unknown field %.80r in a request is ignored", name)


class StreamOptions(Body):
    """What a stream carries beside the text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(Body):
    """What chat and completions share."""

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    cache_salt: str | None = None
    priority: int | None = None
    request_id: str | None = None
    return_token_ids: bool | None = None
    echo: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None

    PASSED: ClassVar[tuple[str, ...]] = (
        *("n", "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty"),
        *("frequency_penalty", "repetition_penalty", "stop", "stop_token_ids"),
        *("include_stop_str_in_output", "ignore_eos", "min_tokens", "allowed_token_ids"),
        *("bad_words", "prompt_logprobs", "skip_special_tokens"),
        "spaces_between_special_tokens",
    )
    """Fields that are sampling parameters under the same name."""

    def check(self) -> None:
        """Refuse combinations that mean nothing, and what is not built."""
        self.check_extras()
        if self.stream_options is not None and not self.stream:
            raise InvalidParameter("stream_options", {}, "only together with stream=true")
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidParameter("prompt_logprobs", self.prompt_logprobs, "only without stream")
        kind = (self.response_format or {}).get("type", "text")
        if kind != "text":
            raise InvalidParameter(
                "response_format.type", kind, '"text": structured output is not available'
            )

    def sampling(self) -> dict[str, Any]:
        """Sampling parameters that the client gave, by their names in ``SamplingParams``."""
        given = {name: getattr(self, name) for name in self.PASSED}
        fields = {name: value for name, value in given.items() if value is not None}
        if self.logit_bias is not None:
            fields["logit_bias"] = {_token(key): value for key, value in self.logit_bias.items()}
        return fields


class ChatBody(GenerationBody):
    """``POST /v1/chat/completions``; text/ checks each message."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    modalities: list[str] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None

    def check(self) -> None:
        """See ``GenerationBody.check``."""
        super().check()
        if self.tools and self.tool_choice != "none":
            raise InvalidParameter("tools", "...", "leave it out: tool calls are not available")
        if self.tool_choice not in (None, "none", "auto"):
            raise InvalidParameter("tool_choice", self.tool_choice, '"none" or "auto"')
        if self.modalities not in (None, ["text"]):
            raise InvalidParameter("modalities", self.modalities, '["text"]')
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidParameter(
                "top_logprobs", self.top_logprobs, "only together with logprobs=true"
            )

    def sampling(self) -> dict[str, Any]:
        """See ``GenerationBody.sampling``."""
        fields = super().sampling()
        max_tokens = self.max_completion_tokens
        name = "max_tokens" if max_tokens is None else "max_completion_tokens"
        if (value := self.max_tokens if max_tokens is None else max_tokens) is not None:
            if value < 1:
                raise InvalidParameter(name, value, "an integer of at least 1")
            fields["max_tokens"] = value
        if self.logprobs:
            if self.top_logprobs is not None and self.top_logprobs < 0:
                raise InvalidParameter("top_logprobs", self.top_logprobs, "0 or more")
            fields["logprobs"] = self.top_logprobs or 0
        return fields


class CompletionBody(GenerationBody):
    """``POST /v1/completions``; text/ checks each prompt."""

    prompt: Any
    logprobs: int | None = None
    suffix: str | None = None
    best_of: int | None = None

    DEFAULT_MAX_TOKENS: ClassVar[int] = 16

    def check(self) -> None:
        """See ``GenerationBody.check``."""
        super().check()
        if self.suffix:
            raise InvalidParameter("suffix", self.suffix, "leave it out: it is not available")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise InvalidParameter("best_of", self.best_of, "leave it out, or the same as n")

    @property
    def prompt_only(self) -> bool:
        """Nothing is to be generated: the prompt's own log-probabilities are wanted."""
        return bool(self.echo) and self.max_tokens == 0

    def sampling(self) -> dict[str, Any]:
        """See ``GenerationBody.sampling``. One token is drawn, and hidden, if none is wanted."""
        fields = super().sampling()
        if self.prompt_only:
            fields["max_tokens"] = 1
        elif self.max_tokens is None:
            fields["max_tokens"] = self.DEFAULT_MAX_TOKENS
        else:
            fields["max_tokens"] = self.max_tokens
        if self.logprobs is not None:
            fields["logprobs"] = self.logprobs
            if self.echo:
                fields.setdefault("prompt_logprobs", self.logprobs)
        return fields


class TokenizeBody(Body):
    """``POST /tokenize``: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(Body):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: list[int]


_AnyBody = TypeVar("_AnyBody", bound=Body)


def parse(model: type[_AnyBody], body: bytes) -> _AnyBody:
    """The body as ``model``, or HttpProblem 400 that names the field."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise of_validation(error, body, model) from error


def _token(key: str) -> int:
    try:
        return int(key)
    except ValueError as error:
        raise InvalidParameter("logit_bias", key, "token ids as keys") from error
