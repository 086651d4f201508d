"""Body of ``POST /v1/responses``, and its chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PrivateAttr

from tandem.protocol.errors import InvalidParameter
from tandem.router.api.openai.bodies import hints, parameters
from tandem.router.api.openai.bodies.bounds import Body
from tandem.router.api.openai.bodies.hints import INCLUDES, Hint, Reading, ignore_tool
from tandem.router.api.openai.bodies.parameters import Refused
from tandem.router.api.openai.bodies.schemas import (
    ChatBody,
    Information,
    Metadata,
    ReasoningEffort,
    Salt,
)
from tandem.router.api.openai.responses.items import Item, plain_items

LOGPROBS = "message.output_text.logprobs"
_CHOICE = '"none", "auto", "required", or {"type": "function", "name": one of tools}'
NAMES: Mapping[str, str] = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format.json_schema.schema": "text.format.schema",
    "response_format.type": "text.format.type",
    "reasoning_effort": "reasoning.effort",
}
"""Names of a chat's parameters in a response."""


class TextFormat(Body):
    """Format of the text. A schema is always enforced."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(default=None, max_length=512)
    description: str | None = Field(default=None, max_length=65_536)
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None

    def check(self, reading: Reading, prefix: str = "") -> None:
        super().check(reading, prefix)
        if (self.schema_ is not None) is not (self.type == "json_schema"):
            allowed = 'a JSON schema for type "json_schema", else null'
            raise InvalidParameter(f"{prefix}schema", self.schema_, allowed)


class TextConfig(Body):
    """Settings of the text of an answer."""

    HINTS: ClassVar[Mapping[str, Hint]] = hints.RESPONSE_TEXT

    format: TextFormat | None = None


class ReasoningConfig(Body):
    """Settings of the reasoning."""

    REFUSED: ClassVar[Mapping[str, Refused]] = parameters.RESPONSE_REASONING
    HINTS: ClassVar[Mapping[str, Hint]] = hints.RESPONSE_REASONING

    effort: ReasoningEffort | None = None


class FunctionTool(Body):
    """Function, or a tool of another type, which is not offered to the model."""

    REFUSED: ClassVar[Mapping[str, Refused]] = parameters.RESPONSE_TOOL
    HINTS: ClassVar[Mapping[str, Hint]] = hints.RESPONSE_TOOL

    type: str
    name: str | None = Field(default=None, min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def check(self, reading: Reading, prefix: str = "") -> None:
        if self.type != "function":
            ignore_tool(self.type, reading)
            return
        if self.name is None:
            raise InvalidParameter(f"{prefix}name", None, "the name of a function")
        super().check(reading, prefix)

    def of_chat(self) -> dict[str, Any]:
        """Return the tool in the form of chats."""
        function = self.model_dump(include={"name", "description", "parameters", "strict"})
        given = {name: value for name, value in function.items() if value is not None}
        return {"type": "function", "function": given}


class ResponsesBody(Body):
    """``POST /v1/responses``."""

    REFUSED: ClassVar[Mapping[str, Refused]] = parameters.RESPONSES
    HINTS: ClassVar[Mapping[str, Hint]] = hints.RESPONSES
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
    """Fields of a chat with the same name."""

    _items: list[Item] = PrivateAttr(default_factory=list)

    @property
    def items(self) -> list[Item]:
        """Return the plain input; after ``check``."""
        return self._items

    @property
    def says_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    def check(self, reading: Reading, prefix: str = "") -> None:
        super().check(reading, prefix)
        for index, tool in enumerate(self.tools or ()):
            tool.check(reading, f"tools[{index}].")
        for index, each in enumerate(self.include or ()):
            if each in INCLUDES:
                reading.ignore("include")
            elif each != LOGPROBS:
                allowed = f"one of {', '.join(sorted([LOGPROBS, *INCLUDES]))}"
                raise InvalidParameter(f"include[{index}]", each, allowed)
        if self.top_logprobs and not self.says_logprobs:
            allowed = f'only together with include=["{LOGPROBS}"]'
            raise InvalidParameter("top_logprobs", self.top_logprobs, allowed)
        if self.max_output_tokens is not None and self.max_output_tokens < 1:
            allowed = "an integer of at least 1"
            raise InvalidParameter("max_output_tokens", self.max_output_tokens, allowed)
        self._check_choice()
        self._items = plain_items(self.input, reading)
        if not self._items and self.previous_response_id is None:
            raise InvalidParameter("input", self.input, "at least one item")

    def _check_choice(self) -> None:
        choice = self.tool_choice
        if choice in (None, "none", "auto"):
            return
        names = [tool.name for tool in self.tools or () if tool.type == "function"]
        if not names:
            allowed = '"none" or "auto" without tools that are functions'
            raise InvalidParameter("tool_choice", choice, allowed)
        named = isinstance(choice, Mapping) and choice.get("type") == "function"
        if choice != "required" and not (named and dict(choice) == self._named(names)):  # type: ignore[arg-type]
            raise InvalidParameter("tool_choice", choice, _CHOICE)
        if self._format() is not None:
            raise InvalidParameter("tool_choice", choice, '"none" or "auto" with text.format')

    def _named(self, names: Sequence[str | None]) -> dict[str, Any]:
        name = self.tool_choice.get("name") if isinstance(self.tool_choice, dict) else None
        return {"type": "function", "name": name} if name in names else {}

    def _format(self) -> TextFormat | None:
        wanted = None if self.text is None else self.text.format
        return None if wanted is None or wanted.type == "text" else wanted

    def chat(self, messages: list[dict[str, Any]]) -> ChatBody:
        """Return the chat. Raises InvalidParameter with a chat's names."""
        fields = {name: getattr(self, name) for name in self.PASSED}
        choice = self.tool_choice
        if isinstance(choice, Mapping):
            choice = {"type": "function", "function": {"name": choice["name"]}}
        functions = [each for each in enumerate(self.tools or ()) if each[1].type == "function"]
        tools = [tool.of_chat() for _, tool in functions]
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
        chat.check(Reading())
        places = [place for place, _ in functions]
        chat.stand_for(tool_places=places, effort_name="reasoning.effort")
        return chat

    def _response_format(self) -> Any:
        wanted = self._format()
        if wanted is None:
            return None
        if wanted.schema_ is None:
            return {"type": wanted.type}
        return {"type": wanted.type, "json_schema": {"schema": wanted.schema_}}


def bodies() -> tuple[type[Body], ...]:
    """Return the types of the document."""
    return (ResponsesBody, TextConfig, TextFormat, ReasoningConfig, FunctionTool)
