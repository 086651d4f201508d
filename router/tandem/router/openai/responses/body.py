"""The body of ``POST /v1/responses``, and the chat that it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PrivateAttr

from tandem.protocol.errors import InvalidParameter
from tandem.router.openai.bodies import parameters
from tandem.router.openai.bodies.body import Body
from tandem.router.openai.bodies.parameters import Refused
from tandem.router.openai.bodies.schemas import (
    ChatBody,
    Information,
    Metadata,
    ReasoningEffort,
    Salt,
)
from tandem.router.openai.bodies.unknown_fields import UnknownFields
from tandem.router.openai.responses.items import Item, plain_items

LOGPROBS = "message.output_text.logprobs"
_CHOICE = '"none", "auto", "required", or {"type": "function", "name": one of tools}'
NAMES: Mapping[str, str] = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format.json_schema.schema": "text.format.schema",
    "response_format.type": "text.format.type",
    "reasoning_effort": "reasoning.effort",
}
"""What a chat calls a parameter, to what a response calls it."""


class TextFormat(Body):
    """What form the text is to have. A schema is always kept to, whatever ``strict`` says."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(default=None, max_length=512)
    description: str | None = Field(default=None, max_length=65_536)
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None

    def check(self, unknown: UnknownFields, prefix: str = "") -> None:
        """See Body."""
        super().check(unknown, prefix)
        if (self.schema_ is not None) is not (self.type == "json_schema"):
            allowed = 'a JSON schema together with the type "json_schema", else nothing'
            raise InvalidParameter(f"{prefix}schema", self.schema_, allowed)


class TextConfig(Body):
    """Of the text of an answer."""

    REFUSED: ClassVar[Mapping[str, Refused]] = parameters.RESPONSE_TEXT

    format: TextFormat | None = None


class ReasoningConfig(Body):
    """How the model is to think."""

    REFUSED: ClassVar[Mapping[str, Refused]] = parameters.RESPONSE_REASONING

    effort: ReasoningEffort | None = None


class FunctionTool(Body):
    """A function that the model may call."""

    REFUSED: ClassVar[Mapping[str, Refused]] = parameters.RESPONSE_TOOL

    type: Literal["function"]
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def of_chat(self) -> dict[str, Any]:
        """As chats have it."""
        function = self.model_dump(include={"name", "description", "parameters", "strict"})
        given = {name: value for name, value in function.items() if value is not None}
        return {"type": "function", "function": given}


class ResponsesBody(Body):
    """``POST /v1/responses``."""

    REFUSED: ClassVar[Mapping[str, Refused]] = parameters.RESPONSES
    EXAMPLE: ClassVar[Mapping[str, Any]] = {
        "input": "What is the capital of France?",
        "max_output_tokens": 16,
        "temperature": 0,
    }

    model: str | None = None
    input: str | Annotated[list[dict[str, Any]], Field(fail_fast=True)]
    instructions: str | None = None
    previous_response_id: str | None = Field(default=None, max_length=256)
    store: bool | None = None
    tools: list[FunctionTool] | None = Field(default=None, fail_fast=True)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: list[str] | None = Field(default=None, fail_fast=True)
    top_logprobs: int | None = None
    max_output_tokens: int | None = None
    truncation: Literal["auto", "disabled"] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: Salt | None = None
    priority: int | None = None
    request_id: str | None = None
    user: Information | None = None
    safety_identifier: Information | None = None
    prompt_cache_key: Information | None = None
    metadata: Annotated[Metadata, Field(max_length=16)] | None = None

    PASSED: ClassVar[tuple[str, ...]] = (
        *("model", "parallel_tool_calls", "temperature", "top_p", "top_k", "min_p", "seed"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty", "stop", "ignore_eos"),
        *("chat_template_kwargs", "cache_salt", "priority", "request_id"),
    )
    """Fields that a chat has under the same name."""

    _items: list[Item] = PrivateAttr(default_factory=list)

    @property
    def items(self) -> list[Item]:
        """The input, plain; after ``check``."""
        return self._items

    @property
    def says_logprobs(self) -> bool:
        """Whether texts come with log-probabilities."""
        return LOGPROBS in (self.include or ())

    def check(self, unknown: UnknownFields, prefix: str = "") -> None:
        """See Body."""
        super().check(unknown, prefix)
        for index, tool in enumerate(self.tools or ()):
            tool.check(unknown, f"tools[{index}].")
        for index, each in enumerate(self.include or ()):
            if each != LOGPROBS:
                allowed = f'"{LOGPROBS}": there is nothing else to include'
                raise InvalidParameter(f"include[{index}]", each, allowed)
        if self.top_logprobs and not self.says_logprobs:
            allowed = f'only together with include=["{LOGPROBS}"]'
            raise InvalidParameter("top_logprobs", self.top_logprobs, allowed)
        if self.max_output_tokens is not None and self.max_output_tokens < 1:
            allowed = "an integer of at least 1"
            raise InvalidParameter("max_output_tokens", self.max_output_tokens, allowed)
        self._check_choice()
        self._items = plain_items(self.input, unknown)
        if not self._items and self.previous_response_id is None:
            raise InvalidParameter("input", self.input, "at least one item")

    def _check_choice(self) -> None:
        choice = self.tool_choice
        if choice in (None, "none", "auto"):
            return
        if not self.tools:
            raise InvalidParameter("tool_choice", choice, '"none" or "auto" without tools')
        names = [tool.name for tool in self.tools]
        named = isinstance(choice, Mapping) and choice.get("type") == "function"
        if choice != "required" and not (named and dict(choice) == self._named(names)):  # type: ignore[arg-type]
            raise InvalidParameter("tool_choice", choice, _CHOICE)
        if self._format() is not None:
            raise InvalidParameter("tool_choice", choice, '"none" or "auto" with text.format')

    def _named(self, names: Sequence[str]) -> dict[str, Any]:
        """A choice by name, of one of ``names``."""
        name = self.tool_choice.get("name") if isinstance(self.tool_choice, dict) else None
        return {"type": "function", "name": name} if name in names else {}

    def _format(self) -> TextFormat | None:
        """What form the text is to have; None where any will do."""
        wanted = None if self.text is None else self.text.format
        return None if wanted is None or wanted.type == "text" else wanted

    def chat(self, messages: list[dict[str, Any]]) -> ChatBody:
        """The chat that has the answer. Raises InvalidParameter in a chat's words."""
        fields = {name: getattr(self, name) for name in self.PASSED}
        choice = self.tool_choice
        if isinstance(choice, Mapping):
            choice = {"type": "function", "function": {"name": choice["name"]}}
        tools = [tool.of_chat() for tool in self.tools or ()]
        chat = ChatBody(
            **fields,
            messages=messages,
            stream=True,
            tools=tools or None,
            tool_choice=choice,
            max_tokens=self.max_output_tokens,
            logprobs=self.says_logprobs or None,
            top_logprobs=self.top_logprobs if self.says_logprobs else None,
            reasoning_effort=None if self.reasoning is None else self.reasoning.effort,
            response_format=self._response_format(),
        )
        chat.check(UnknownFields())
        return chat

    def _response_format(self) -> Any:
        wanted = self._format()
        if wanted is None:
            return None
        if wanted.schema_ is None:
            return {"type": wanted.type}
        return {"type": wanted.type, "json_schema": {"schema": wanted.schema_}}


def bodies() -> tuple[type[Body], ...]:
    """All that the document names."""
    return (ResponsesBody, TextConfig, TextFormat, ReasoningConfig, FunctionTool)
