"""Types of the bodies that clients send; the engine checks ranges.

null is the same as absent. Fields have an effect, unless they are hints; other known fields are
refused by ``parameters``, unknown ones by ``unknown_fields``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PrivateAttr, WithJsonSchema

from tandem.protocol.errors import InvalidParameter
from tandem.protocol.sampling import ALL_LOGPROBS, ExtraArg
from tandem.router.api.openai.bodies import hints, parameters
from tandem.router.api.openai.bodies.bounds import Body, Embeds, Prompts
from tandem.router.api.openai.bodies.hints import Hint, Reading
from tandem.router.api.openai.bodies.parameters import Refused
from tandem.router.api.openai.bodies.tools import (
    ResponseFormat,
    StructuredOutputs,
    check_choice,
    functions_of,
    is_forced,
    schema_of,
    wanted_of,
)

Information = Annotated[str, Field(max_length=512)]
"""Data about the caller, without effect."""
Metadata = dict[
    Annotated[str, Field(max_length=64)],
    Annotated[str, Field(max_length=512)],
]
Salt = Annotated[str, Field(min_length=1, max_length=1024)]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


Messages = Annotated[
    list[dict[str, Any]],
    WithJsonSchema(
        {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"role": {"type": "string", "minLength": 1}},
                "required": ["role"],
            },
            "minItems": 1,
        }
    ),
]
"""A chat; text/ checks each message."""


class StreamOptions(Body):
    """Parts of a stream in addition to the text."""

    HINTS: ClassVar[Mapping[str, Hint]] = hints.STREAM_OPTIONS

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(Body):
    """Fields of both chats and completions."""

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
    vllm_xargs: dict[str, ExtraArg] | None = None
    allowed_token_ids: list[int] | None = Field(default=None, fail_fast=True)
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    cache_salt: Salt | None = None
    priority: int | None = None
    timeout: float | None = None
    partial_on_timeout: bool | None = None
    request_id: str | None = None
    return_token_ids: bool | None = None
    echo: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    structured_outputs: StructuredOutputs | None = None
    response_format: ResponseFormat | None = None
    user: Information | None = None
    safety_identifier: Information | None = None
    prompt_cache_key: Information | None = None
    session_id: Information | None = None
    metadata: Annotated[Metadata, Field(max_length=16)] | None = None

    PASSED: ClassVar[tuple[str, ...]] = (
        *("n", "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty"),
        *("frequency_penalty", "repetition_penalty", "stop", "stop_token_ids"),
        *("include_stop_str_in_output", "ignore_eos", "min_tokens", "allowed_token_ids"),
        *("bad_words", "prompt_logprobs", "skip_special_tokens"),
        "spaces_between_special_tokens",
    )
    """Sampling parameters with the same name."""

    def check(self, reading: Reading, prefix: str = "") -> None:
        """Raise InvalidParameter for meaningless combinations and unsupported fields."""
        options = self.stream_options
        if options is not None and not self.stream and options.model_dump(exclude_none=True):
            raise InvalidParameter(
                "stream_options",
                options.model_dump(exclude_none=True),
                "only together with stream=true",
            )
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidParameter("prompt_logprobs", self.prompt_logprobs, "only without stream")
        if self.truncation_side is not None and self.truncate_prompt_tokens is None:
            raise InvalidParameter(
                "truncation_side", self.truncation_side, "only with truncate_prompt_tokens"
            )
        super().check(reading, prefix)

    def sampling(self) -> dict[str, Any]:
        """Return the sampling parameters, by their names in ``SamplingParams``."""
        given = {name: getattr(self, name) for name in self.PASSED}
        fields = {name: value for name, value in given.items() if value is not None}
        if self.logit_bias is not None:
            fields["logit_bias"] = _by_token(self.logit_bias)
        if self.vllm_xargs:
            fields["extra_args"] = self.vllm_xargs
        wanted = wanted_of(self.structured_outputs, self.response_format)
        if wanted is not None:
            fields["structured_outputs"] = wanted
        return fields

    def client_names(self) -> dict[str, str]:
        """Return the client's other names of sampling parameters."""
        return {} if self.response_format is None else self.response_format.client_names()


class ChatBody(GenerationBody):
    """``POST /v1/chat/completions``; text/ checks each message."""

    REFUSED: ClassVar[Mapping[str, Refused]] = parameters.CHAT
    HINTS: ClassVar[Mapping[str, Hint]] = hints.CHAT

    EXAMPLE: ClassVar[Mapping[str, Any]] = {
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 16,
        "temperature": 0,
    }

    messages: Messages
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    return_prompt_text: bool | None = None

    _tool_places: list[int] = PrivateAttr(default_factory=list)
    _ignored: dict[str, None] = PrivateAttr(default_factory=dict)
    _held_form: dict[str, Any] | None = PrivateAttr(default=None)
    _effort_name: str = PrivateAttr(default="reasoning_effort")

    def check(self, reading: Reading, prefix: str = "") -> None:
        if self.tools is not None:
            self.tools, self._tool_places = functions_of(self.tools, reading)
        form = wanted_of(self.structured_outputs, self.response_format)
        check_choice(self.tool_choice, self.tools or (), has_form=form is not None)
        if self.top_logprobs and not self.logprobs:
            raise InvalidParameter(
                "top_logprobs", self.top_logprobs, "only together with logprobs=true"
            )
        if self.max_completion_tokens and self.max_tokens not in (None, self.max_completion_tokens):
            raise InvalidParameter(
                "max_tokens", self.max_tokens, "leave it out, or the same as max_completion_tokens"
            )
        super().check(reading, prefix)

    def sampling(self) -> dict[str, Any]:
        fields = super().sampling()
        if self.thinking_token_budget is not None:
            fields["thinking_token_budget"] = self.thinking_token_budget
        max_tokens = self.max_completion_tokens
        name = "max_tokens" if max_tokens is None else "max_completion_tokens"
        if (value := self.max_tokens if max_tokens is None else max_tokens) is not None:
            if value < 1:
                raise InvalidParameter(name, value, "an integer of at least 1")
            fields["max_tokens"] = value
        if self.logprobs:
            if self.top_logprobs is not None and self.top_logprobs < ALL_LOGPROBS:
                raise InvalidParameter(
                    "top_logprobs", self.top_logprobs, "0 or more, or -1 for all"
                )
            fields["logprobs"] = self.top_logprobs or 0
        if is_forced(self.tool_choice):
            parallel = self.parallel_tool_calls is not False
            schema = schema_of(
                self.tool_choice,
                self.tools or (),
                parallel=parallel,
                place_of=self.tool_place,
            )
            fields["structured_outputs"] = {"json": schema, "disable_any_whitespace": True}
        return fields

    def client_names(self) -> dict[str, str]:
        names = {**super().client_names(), "logprobs": "top_logprobs"}
        if is_forced(self.tool_choice):
            names["structured_outputs.json"] = "tools"
        elif self.held_form:
            names["structured_outputs.structural_tag"] = "tools"
        if self.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        return names

    def tool_place(self, index: int) -> int:
        """Return the index of a kept tool in the request's list."""
        return self._tool_places[index] if index < len(self._tool_places) else index

    def stand_for(self, *, tool_places: list[int], effort_name: str) -> None:
        """Set names of another API's request: the indices of kept tools, and of the effort."""
        self._tool_places, self._effort_name = tool_places, effort_name

    @property
    def held_form(self) -> dict[str, Any] | None:
        """Return the sampling parameters for strict tools; None until made."""
        return self._held_form

    @held_form.setter
    def held_form(self, form: dict[str, Any]) -> None:
        self._held_form = form

    @property
    def effort_name(self) -> str:
        """Return the request's name of ``reasoning_effort``."""
        return self._effort_name

    def ignore(self, name: str) -> None:
        self._ignored[name] = None

    @property
    def ignored(self) -> list[str]:
        """Return hints that have no effect with this model."""
        return [*self._ignored]

    @property
    def continued(self) -> str:
        """Return the text of the last message if the answer continues it, else ""."""
        return self.last_text if self.continue_final_message else ""

    @property
    def last_text(self) -> str:
        """Return the text of the last message."""
        message = self.messages[-1]
        content = message.get("content")
        if content in (None, ""):
            content = message.get("refusal")
        if isinstance(content, str):
            return content
        parts = [
            each.get("text", each.get("refusal")) if isinstance(each, dict) else each
            for each in (content if isinstance(content, list) else ())
        ]
        return "\n".join(each for each in parts if isinstance(each, str))


class CompletionBody(GenerationBody):
    """``POST /v1/completions``; text/ checks each prompt."""

    REFUSED: ClassVar[Mapping[str, Refused]] = parameters.COMPLETION
    HINTS: ClassVar[Mapping[str, Hint]] = hints.COMPLETION
    EXAMPLE: ClassVar[Mapping[str, Any]] = {
        "prompt": "The capital of France is",
        "max_tokens": 8,
        "temperature": 0,
    }

    prompt: Prompts | None = None
    prompt_embeds: Embeds | None = None
    logprobs: int | None = None
    best_of: int | None = None

    DEFAULT_MAX_TOKENS: ClassVar[int] = 16

    def check(self, reading: Reading, prefix: str = "") -> None:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise InvalidParameter("best_of", self.best_of, "leave it out, or the same as n")
        if not self.prompt_embeds and self.prompt is None:
            allowed = "a text, token ids, or a list of either; or prompt_embeds in its place"
            raise InvalidParameter("prompt", None, allowed)
        if self.prompt_embeds and self.echo:
            allowed = "false with prompt_embeds: a prompt of embeddings has no text"
            raise InvalidParameter("echo", True, allowed)
        super().check(reading, prefix)

    def take_embeds(self) -> list[str]:
        """Return the prompts of embeddings, and drop them here."""
        given, self.prompt_embeds = self.prompt_embeds, None
        return [given] if isinstance(given, str) and given else list(given or ())

    @property
    def prompt_only(self) -> bool:
        """Return whether only the prompt's log-probabilities are requested."""
        return bool(self.echo) and self.max_tokens == 0

    def sampling(self) -> dict[str, Any]:
        """If no token is requested, one is drawn and hidden."""
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

    REFUSED: ClassVar[Mapping[str, Refused]] = parameters.TOKENIZE
    EXAMPLE: ClassVar[Mapping[str, Any]] = {"prompt": "Hello", "return_token_strs": True}

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    OF_CHATS: ClassVar[tuple[str, ...]] = (
        *("add_generation_prompt", "continue_final_message", "tools"),
        *("chat_template", "chat_template_kwargs"),
    )
    """Fields that are allowed with ``messages`` only."""

    def check(self, reading: Reading, prefix: str = "") -> None:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidParameter("prompt", self.prompt, "either prompt or messages")
        for name in self.OF_CHATS if self.messages is None else ():
            if getattr(self, name):
                raise InvalidParameter(name, getattr(self, name), "only together with messages")
        if self.tools is not None:
            self.tools = functions_of(self.tools, reading)[0]
        super().check(reading, prefix)


class LogLevelBody(Body):
    """``POST /log_level``."""

    EXAMPLE: ClassVar[Mapping[str, Any]] = {"log_level": "info"}

    log_level: Literal["debug", "info", "warning", "error"]


class AbortBody(Body):
    """``POST /abort_requests``."""

    EXAMPLE: ClassVar[Mapping[str, Any]] = {"request_ids": ["chatcmpl-1"]}

    request_ids: Annotated[list[str], Field(min_length=1, max_length=1_024, fail_fast=True)]


class DetokenizeBody(Body):
    """``POST /detokenize``."""

    EXAMPLE: ClassVar[Mapping[str, Any]] = {"tokens": [19, 20]}

    model: str | None = None
    tokens: list[int] = Field(fail_fast=True)


def _by_token(biases: Mapping[str, float]) -> dict[int, float]:
    """Return the biases by id. Raises InvalidParameter that names every key that is not an id."""
    wrong = [key for key in biases if not (key.isascii() and key.isdecimal() and len(key) <= 10)]
    if wrong:
        value = wrong if len(wrong) > 1 else wrong[0]
        raise InvalidParameter("logit_bias", value, "token ids as keys")
    return {int(key): bias for key, bias in biases.items()}
