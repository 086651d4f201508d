"""The bodies of ``POST /v1/messages`` and of its count of tokens, and the chat that they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, PrivateAttr

from tandem.protocol.errors import InvalidParameter
from tandem.router.anthropic import parameters
from tandem.router.anthropic.blocks import messages_of
from tandem.router.openai.bodies import hints
from tandem.router.openai.bodies.body import Body
from tandem.router.openai.bodies.hints import Hint, ignore_tool
from tandem.router.openai.bodies.numbers import MAX_INTEGER
from tandem.router.openai.bodies.parameters import Refused
from tandem.router.openai.bodies.reading import Reading
from tandem.router.openai.bodies.schemas import ChatBody, Information, Messages

CacheControl = dict[str, Any]
"""Cache marks, without effect: prefixes are cached for all requests, and no answer changes."""
NAMES: Mapping[str, str] = {
    "response_format.json_schema.schema": "output_config.format.schema",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
}
"""Names of a chat's parameters in a message."""


class Tool(Body):
    """A tool that the client describes and runs, or one of another type, which the model is not
    offered."""

    REFUSED: ClassVar[Mapping[str, Refused]] = parameters.TOOL
    HINTS: ClassVar[Mapping[str, Hint]] = hints.MESSAGE_TOOL

    type: str | None = None
    name: str | None = Field(default=None, min_length=1)
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None

    @property
    def is_custom(self) -> bool:
        """Return whether the client describes it."""
        return self.type in (None, "custom")

    def check(self, reading: Reading, prefix: str = "") -> None:
        """See Body."""
        if not self.is_custom:
            ignore_tool(self.type or "", reading)
            return
        if self.name is None:
            raise InvalidParameter(f"{prefix}name", None, "the name of a tool")
        if self.input_schema is None:
            raise InvalidParameter(f"{prefix}input_schema", None, "a JSON schema")
        super().check(reading, prefix)

    def of_chat(self) -> dict[str, Any]:
        """Return the tool in the form of chats."""
        function = {"name": self.name, "description": self.description, "strict": self.strict}
        given = {name: value for name, value in function.items() if value is not None}
        return {"type": "function", "function": {**given, "parameters": self.input_schema}}


class ToolChoice(Body):
    """Which tools the answer is to call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    def check(self, reading: Reading, prefix: str = "") -> None:
        """See Body."""
        super().check(reading, prefix)
        if (self.name is not None) is not (self.type == "tool"):
            allowed = 'the name of a tool together with the type "tool", else nothing'
            raise InvalidParameter(f"{prefix}name", self.name, allowed)


class Thinking(Body):
    """Switch of the reasoning."""

    HINTS: ClassVar[Mapping[str, Hint]] = hints.THINKING

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(default=None, ge=1, le=MAX_INTEGER)

    def check(self, reading: Reading, prefix: str = "") -> None:
        """See Body."""
        super().check(reading, prefix)
        if self.budget_tokens is not None and self.type != "enabled":
            allowed = 'only with the type "enabled"'
            raise InvalidParameter(f"{prefix}budget_tokens", self.budget_tokens, allowed)


class OutputFormat(Body):
    """Format of the text."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """Reasoning effort, and format of the text."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class Metadata(Body):
    """On the caller."""

    user_id: Information | None = None


class CountBody(Body):
    """``POST /v1/messages/count_tokens``."""

    REFUSED: ClassVar[Mapping[str, Refused]] = parameters.COUNT
    HINTS: ClassVar[Mapping[str, Hint]] = hints.COUNT
    EXAMPLE: ClassVar[Mapping[str, Any]] = {"messages": [{"role": "user", "content": "Hello"}]}

    model: str | None = None
    messages: Messages
    system: str | list[dict[str, Any]] | None = Field(default=None)
    tools: list[Tool] | None = Field(default=None, fail_fast=True)
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None

    _chat: list[dict[str, Any]] = PrivateAttr(default_factory=list)

    def check(self, reading: Reading, prefix: str = "") -> None:
        """See Body."""
        super().check(reading, prefix)
        for index, tool in enumerate(self.tools or ()):
            tool.check(reading, f"tools[{index}].")
        self._check_choice()
        self._chat = messages_of(self.system, self.messages, reading)
        if self._chat[-1].get("tool_calls"):
            place = f"messages[{len(self.messages) - 1}]"
            raise InvalidParameter(place, self.messages[-1], "results of the tools after it")

    def _check_choice(self) -> None:
        choice = self.tool_choice
        if choice is None or choice.type in ("auto", "none"):
            return
        given = choice.model_dump(exclude_none=True)
        names = [tool.name for tool in self.tools or () if tool.is_custom]
        if not names:
            allowed = '"auto" or "none" without tools that the client describes'
            raise InvalidParameter("tool_choice", given, allowed)
        if choice.type == "tool" and choice.name not in names:
            raise InvalidParameter("tool_choice.name", choice.name, "the name of one of tools")
        if self.output_config is not None and self.output_config.format is not None:
            allowed = '"auto" or "none" together with output_config.format'
            raise InvalidParameter("tool_choice", given, allowed)

    def chat(self, **fields: Any) -> ChatBody:
        """Return the chat that has the answer, with more ``fields``.

        Raises InvalidParameter with the names of a chat's parameters.
        """
        config = self.output_config or OutputConfig()
        goes_on = self._chat[-1]["role"] == "assistant"
        tools = [each for each in enumerate(self.tools or ()) if each[1].is_custom]
        chat = ChatBody(
            **fields,
            model=self.model,
            messages=self._chat,
            stream=True,
            tools=[tool.of_chat() for _, tool in tools] or None,
            tool_choice=self._chat_choice(),
            parallel_tool_calls=not (
                self.tool_choice is not None and self.tool_choice.disable_parallel_tool_use
            ),
            continue_final_message=goes_on or None,
            reasoning_effort=self._effort(config),
            thinking_token_budget=None if self.thinking is None else self.thinking.budget_tokens,
            response_format=None if config.format is None else _json_schema(config.format),  # type: ignore[arg-type]
        )
        chat.check(Reading())
        places = [place for place, _ in tools]
        named = "thinking" if config.effort is None else "output_config.effort"
        chat.stand_for(tool_places=places, effort_name=named)
        return chat

    def _chat_choice(self) -> str | dict[str, Any] | None:
        choice = self.tool_choice
        if choice is None:
            return None
        if choice.type == "tool":
            return {"type": "function", "function": {"name": choice.name}}
        return "required" if choice.type == "any" else choice.type

    def _effort(self, config: OutputConfig) -> Any:
        if self.thinking is not None and self.thinking.type == "disabled":
            return "none"
        asked = self.thinking is not None and self.thinking.type == "enabled"
        return config.effort or ("medium" if asked else None)


class MessagesBody(CountBody):
    """``POST /v1/messages``."""

    REFUSED: ClassVar[Mapping[str, Refused]] = parameters.MESSAGES
    HINTS: ClassVar[Mapping[str, Hint]] = hints.MESSAGES
    EXAMPLE: ClassVar[Mapping[str, Any]] = {
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 16,
        "temperature": 0,
    }

    max_tokens: int
    stop_sequences: list[str] | None = Field(default=None, fail_fast=True)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None
    metadata: Metadata | None = None

    def chat(self, **fields: Any) -> ChatBody:
        """See CountBody."""
        return super().chat(
            **fields,
            max_tokens=self.max_tokens,
            stop=self.stop_sequences,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
        )


def _json_schema(wanted: OutputFormat) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"schema": wanted.schema_}}


def bodies() -> tuple[type[Body], ...]:
    """Return the types that the document names."""
    return (
        *(MessagesBody, CountBody, Tool, ToolChoice, Thinking, OutputFormat, OutputConfig),
        Metadata,
    )
