"""Bodies of ``POST /v1/messages`` and of its count of tokens, and their chats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field, PrivateAttr

from tandem.protocol.errors import InvalidParameter
from tandem.router.api.openai.bodies import hints
from tandem.router.api.openai.bodies.bounds import MAX_INTEGER, Body
from tandem.router.api.openai.bodies.hints import Hint, Reading, ignore_tool
from tandem.router.api.openai.bodies.parameters import Refused
from tandem.router.api.openai.bodies.schemas import ChatBody, Information, Messages

Message = dict[str, Any]
Content = str | Sequence[Mapping[str, Any]]

_ROLES = ("user", "assistant", "system")
_KEYS: Mapping[str, tuple[str, ...]] = {
    "text": ("type", "text", "cache_control", "citations"),
    "thinking": ("type", "thinking", "signature", "cache_control"),
    "tool_use": ("type", "id", "name", "input", "cache_control", "caller"),
    "tool_result": ("type", "tool_use_id", "content", "is_error", "cache_control"),
}
"""Keys by kind of block; cache marks, citations and signatures have no effect."""
_OF_ROLES = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "tool_use"),
    "system": ("text",),
}
FAILED = "Error: "
"""Prefix of the result of a failed tool."""


def messages_of(
    system: Content | None, messages: Sequence[Mapping[str, Any]], reading: Reading
) -> list[Message]:
    """Return the messages of the chat. Raises InvalidParameter that names the place."""
    found: list[Message] = []
    if system:
        parts = _texts("system", _blocks("system", system, "system", reading))
        found.append({"role": "system", "content": parts})
    called: set[str] = set()
    for index, each in enumerate(messages):
        where = f"messages[{index}]"
        role = each.get("role")
        if role not in _ROLES:
            raise InvalidParameter(f"{where}.role", role, f"one of {', '.join(_ROLES)}")
        for name, value in each.items():
            if name not in ("role", "content"):
                reading.meet(f"{where}.", name, value, ("role", "content"))
        where = f"{where}.content"
        blocks = _blocks(where, each.get("content"), role, reading)
        if role == "assistant":
            found.append(_assistant_message(where, blocks, called))
        else:
            found += _asked(where, role, blocks, called)
    if not messages:
        raise InvalidParameter("messages", [], "at least one message")
    return found


def _blocks(where: str, content: object, role: str, reading: Reading) -> list[Mapping[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise InvalidParameter(where, content, "a text or a list of blocks")
    for index, block in enumerate(content):
        at = f"{where}[{index}]"
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "redacted_thinking" and role == "assistant":
            reading.ignore("messages.content.redacted_thinking")
            continue
        if kind not in _OF_ROLES[role]:
            allowed = f"one of {', '.join(_OF_ROLES[role])}: this server accepts text only"
            raise InvalidParameter(f"{at}.type", kind, allowed)
        for name, value in block.items():
            if name not in _KEYS[kind] and value is not None:
                reading.meet(f"{at}.", name, value, _KEYS[kind])
        if block.get("cache_control") is not None:
            reading.ignore("messages.content.cache_control")
    return content


def _assistant_message(
    where: str, blocks: Sequence[Mapping[str, Any]], called: set[str]
) -> Message:
    message: Message = {"role": "assistant"}
    texts, thoughts, calls = [], [], []
    for index, block in enumerate(blocks):
        at = f"{where}[{index}]"
        if block["type"] == "text":
            texts.append(_text(at, block, "text"))
        elif block["type"] == "thinking":
            thoughts.append(_text(at, block, "thinking"))
        elif block["type"] == "tool_use":
            given = block.get("input")
            if not isinstance(given, Mapping):
                raise InvalidParameter(f"{at}.input", given, "an object")
            called.add(_text(at, block, "id"))
            function = {"name": _text(at, block, "name"), "arguments": given}
            calls.append({"id": block["id"], "type": "function", "function": function})
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if texts or not calls:
        message["content"] = "".join(texts)
    if calls:
        message["tool_calls"] = calls
    return message


def _asked(
    where: str, role: str, blocks: Sequence[Mapping[str, Any]], called: set[str]
) -> list[Message]:
    found: list[Message] = []
    texts: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        at = f"{where}[{index}]"
        if block["type"] == "text":
            texts.append({"type": "text", "text": _text(at, block, "text")})
        else:
            found.append(_result(at, block, called))
    if texts or not found:
        content = texts[0]["text"] if len(texts) == 1 else texts
        found.append({"role": role, "content": content})
    return found


def _result(where: str, block: Mapping[str, Any], called: set[str]) -> Message:
    name = _text(where, block, "tool_use_id")
    if name not in called:
        allowed = "the id of a tool_use before it"
        raise InvalidParameter(f"{where}.tool_use_id", name, allowed)
    content = block.get("content") or ""
    if not isinstance(content, str):
        place = f"{where}.content"
        content = "\n".join(part["text"] for part in _texts(place, _listed(place, content)))
    failed = block.get("is_error")
    if failed not in (None, True, False):
        raise InvalidParameter(f"{where}.is_error", failed, "true or false")
    text = FAILED + content if failed else content
    return {"role": "tool", "tool_call_id": name, "content": text}


def _listed(where: str, content: object) -> list[Mapping[str, Any]]:
    if not isinstance(content, list):
        raise InvalidParameter(where, content, "a text or a list of blocks of type text")
    return content


def _texts(where: str, blocks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    for index, block in enumerate(blocks):
        if not isinstance(block, Mapping) or block.get("type") != "text":
            allowed = "a block of type text: this server accepts text only"
            raise InvalidParameter(f"{where}[{index}]", block, allowed)
    texts = [_text(f"{where}[{index}]", block, "text") for index, block in enumerate(blocks)]
    return [{"type": "text", "text": text} for text in texts]


def _text(where: str, block: Mapping[str, Any], name: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise InvalidParameter(f"{where}.{name}", value, "a text")
    return value


_NO_TOOLS = "tools are run by the client"

TOOL: Mapping[str, Refused] = {
    "allowed_callers": Refused(_NO_TOOLS, (["direct"],)),
}

COUNT: Mapping[str, Refused] = {
    "workspace_id": Refused("this server has no workspaces"),
}

MESSAGES: Mapping[str, Refused] = {
    **COUNT,
    "container": Refused(_NO_TOOLS),
    "inference_geo": Refused("this server has one region"),
}


CacheControl = dict[str, Any]
"""Cache marks, without effect."""
NAMES: Mapping[str, str] = {
    "response_format.json_schema.schema": "output_config.format.schema",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
}
"""Names of a chat's parameters in a message."""


class Tool(Body):
    """Tool that the client runs, or one of another type, which is not offered to the model."""

    REFUSED: ClassVar[Mapping[str, Refused]] = TOOL
    HINTS: ClassVar[Mapping[str, Hint]] = hints.MESSAGE_TOOL

    type: str | None = None
    name: str | None = Field(default=None, min_length=1)
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None

    @property
    def is_custom(self) -> bool:
        return self.type in (None, "custom")

    def check(self, reading: Reading, prefix: str = "") -> None:
        if not self.is_custom:
            ignore_tool(self.type or "", reading)
            return
        if self.name is None:
            raise InvalidParameter(f"{prefix}name", None, "the name of a tool")
        if self.input_schema is None:
            raise InvalidParameter(f"{prefix}input_schema", None, "a JSON schema")
        super().check(reading, prefix)

    def of_chat(self) -> dict[str, Any]:
        function = {"name": self.name, "description": self.description, "strict": self.strict}
        given = {name: value for name, value in function.items() if value is not None}
        return {"type": "function", "function": {**given, "parameters": self.input_schema}}


class ToolChoice(Body):
    """Tools that the answer may or must call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    def check(self, reading: Reading, prefix: str = "") -> None:
        super().check(reading, prefix)
        if (self.name is not None) is not (self.type == "tool"):
            allowed = 'the name of a tool with type "tool", else null'
            raise InvalidParameter(f"{prefix}name", self.name, allowed)


class Thinking(Body):
    """Switch of the reasoning."""

    HINTS: ClassVar[Mapping[str, Hint]] = hints.THINKING

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(default=None, ge=1, le=MAX_INTEGER)

    def check(self, reading: Reading, prefix: str = "") -> None:
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
    """Data about the caller."""

    user_id: Information | None = None


class CountBody(Body):
    """``POST /v1/messages/count_tokens``."""

    REFUSED: ClassVar[Mapping[str, Refused]] = COUNT
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
        """Return the chat for the answer, with more ``fields``. Raises InvalidParameter."""
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

    REFUSED: ClassVar[Mapping[str, Refused]] = MESSAGES
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
    """Return the types of the document."""
    return (
        *(MessagesBody, CountBody, Tool, ToolChoice, Thinking, OutputFormat, OutputConfig),
        Metadata,
    )
