"""Rendering of chat templates: Jinja sources that come with a model, in a sandbox.

Templates work as in Hugging Face's renderer. Every error of a template becomes InvalidParameter.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn, Protocol

from jinja2 import (
    TemplateError,
    TemplateSyntaxError,
    meta,
    nodes,
)
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from tandem.protocol.errors import InvalidParameter
from tandem.text.chat_calls import plain_calls
from tandem.text.chat_turns import in_turns, with_form
from tandem.text.folder import DEFAULT_TEMPLATE, TOOL_TEMPLATE
from tandem.text.template_traits import CALLS, INVALID, TemplateTraits

ROLES = ("system", "developer", "user", "assistant", "tool", "function")

Message = dict[str, Any]

_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Key of the text of each type of part."""
_STRINGS = ("name", "tool_call_id", "refusal", "reasoning", "reasoning_content")


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return copies of ``messages`` without null values.

    Raises InvalidParameter that names the message and the key.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise InvalidParameter("messages", messages, "a list of messages")
    if not messages:
        raise InvalidParameter("messages", [], "at least one message")
    return [_plain(f"messages[{index}]", each) for index, each in enumerate(messages)]


def _plain(where: str, message: object) -> Message:
    if not isinstance(message, Mapping):
        raise InvalidParameter(where, message, "an object with role and content")
    plain = {key: value for key, value in message.items() if value is not None}
    role = plain.get("role")
    if role not in ROLES:
        raise InvalidParameter(f"{where}.role", role, f"one of {', '.join(ROLES)}")
    for key in _STRINGS:
        if not isinstance(plain.get(key, ""), str):
            raise InvalidParameter(f"{where}.{key}", plain[key], "a text")
    if "audio" in plain:
        raise InvalidParameter(f"{where}.audio", plain["audio"], "leave it out: text only")
    if role == "assistant":
        _plain_assistant(where, plain)
    plain["content"] = _content(f"{where}.content", plain)
    return plain


def _plain_assistant(where: str, message: Message) -> None:
    refusal = message.pop("refusal", "")
    if message.get("content") in (None, ""):
        message["content"] = refusal
    if "reasoning" in message:
        message.setdefault("reasoning_content", message["reasoning"])
    calls = plain_calls(where, message)
    message.pop("function_call", None)
    message.pop("tool_calls", None)
    if calls:
        message["tool_calls"] = calls


def _content(where: str, message: Message) -> str | list[dict[str, str]]:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidParameter(where, content, "a text or a list of parts")
    return [_part(f"{where}[{index}]", part) for index, part in enumerate(content)]


def _part(where: str, part: object) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type") if isinstance(part, Mapping) else None
    key = _TEXTS.get(kind, "") if isinstance(kind, str) else ""
    text = part.get(key) if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or not isinstance(text, str):
        raise InvalidParameter(
            where,
            part,
            'a part {"type": "text", "text": ...} or {"type": "refusal", ...}: text only',
        )
    rest = {name: value for name, value in part.items() if name not in ("type", key)}
    return {"type": "text", "text": text, **rest}


FORMAT = "hermes"
_MARKS = ("tool", "function", "python_tag", "<|channel|>")
"""Every template that shows tools or calls contains one of these texts, in small letters."""
_SYSTEM = ("system", "developer")


def knows_no_tools(source: str) -> bool:
    """Return whether a template's source does not show tools or calls."""
    small = source.lower()
    return not any(mark in small for mark in _MARKS)


def in_words(messages: list[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return a chat with calls and results as text, and ``tools`` in its system message."""
    return _with_tools([_written(each) for each in messages], tools)


def _written(message: Message) -> Message:
    if message["role"] in ("tool", "function"):
        text = f"<tool_response>\n{_text(message['content'])}\n</tool_response>"
        return {"role": "user", "content": text}
    calls = message.get("tool_calls")
    if not calls:
        return message
    words = [_text(message["content"])] if message["content"] else []
    for call in calls:
        function = call["function"]
        asked = {"name": function["name"], "arguments": function["arguments"]}
        words.append(f"<tool_call>\n{json.dumps(asked, ensure_ascii=False)}\n</tool_call>")
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": "\n".join(words)}


def _with_tools(messages: list[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    functions = [json.dumps(each.get("function", each), ensure_ascii=False) for each in tools]
    taught = (
        "You may call functions. These are there, each as a JSON object:\n<tools>\n"
        + "\n".join(functions)
        + "\n</tools>\nTo call one, write\n<tool_call>\n"
        '{"name": "the function\'s name", "arguments": {"its arguments": "as JSON"}}\n'
        "</tool_call>\nand wait: its result comes in <tool_response>. "
        "If you have the result, answer with it."
    )
    first = messages[0]
    if first["role"] not in _SYSTEM:
        return [{"role": "system", "content": taught}, *messages]
    content = first["content"]
    if isinstance(content, list):
        joined: Any = [*content, {"type": "text", "text": f"\n\n{taught}"}]
    else:
        joined = f"{content}\n\n{taught}" if content else taught
    return [{**first, "content": joined}, *messages[1:]]


def _text(content: str | list[dict[str, str]]) -> str:
    return content if isinstance(content, str) else "\n".join(each["text"] for each in content)


class _Generation(Extension):
    """``{% generation %}`` marks text for training; here it only renders."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _SafeNamespace(Namespace):
    """Jinja's namespace without names that could be Python internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # No ``self`` in the signature, which would forbid namespace(self=...).
        _refuse_private(dict(*args[1:], **kwargs))
        Namespace.__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private((name,))
        super().__setitem__(name, value)


def _refuse_private(names: Iterable[object]) -> None:
    for name in names:
        if str(name).startswith("_"):
            raise SecurityError(f"a namespace holds no name like {name!r}")


def template_environment() -> ImmutableSandboxedEnvironment:
    """Return a sandbox to compile one template in."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, LoopControlExtension]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_raise_exception,
        strftime_now=_strftime_now,
        namespace=_SafeNamespace,
        dict=_make_dict,
    )
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """Return a dict. A function, so that no template gets a reference to the class."""
    return dict(*args, **kwargs)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def fitted(messages: Sequence[Message], traits: TemplateTraits) -> list[Message]:
    """Return messages with the same content, in the form that the template accepts."""
    found = [_with_role(each, traits) for each in messages]
    found = [_with_content(each, traits) for each in found]
    if any("tool_calls" in each or each["role"] == "tool" for each in found):
        if traits.id_form is not None:
            found = with_form(found, traits.id_form)
        found = [_with_arguments(each, traits) for each in found]
    return in_turns(found, traits.turns) if _needs_turns(found) else found


def _needs_turns(messages: Sequence[Message]) -> bool:
    usual = ("user", "assistant")
    return any(
        each["role"] != usual[at % 2] or "tool_calls" in each for at, each in enumerate(messages)
    )


def _with_role(message: Message, traits: TemplateTraits) -> Message:
    if message["role"] == "developer" and not traits.knows_developer:
        return {**message, "role": "system"}
    if message["role"] == "function" and not traits.knows_function:
        return {**message, "role": "tool"}
    return message


def _with_content(message: Message, traits: TemplateTraits) -> Message:
    kind = CALLS if "tool_calls" in message else message["role"]
    content = message["content"]
    if isinstance(content, list):
        if not traits.takes_parts(kind):
            content = "\n".join(part["text"] for part in content)
    elif content and traits.needs_parts(kind):
        content = [{"type": "text", "text": content}]
    if traits.asks_for_none and kind == CALLS and not content:
        content = None
    return {**message, "content": content}


def _with_arguments(message: Message, traits: TemplateTraits) -> Message:
    if "tool_calls" not in message:
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": _arguments(call, traits)}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _arguments(call: Mapping[str, Any], traits: TemplateTraits) -> object:
    arguments = call["function"]["arguments"]
    if isinstance(arguments, str):
        if not traits.wraps_invalid:
            return arguments
        arguments = {INVALID: arguments}
    return json.dumps(arguments, ensure_ascii=False) if traits.writes_arguments else arguments


_CONTINUED = "\ue000continue-here\ue000"
"""Mark at the end of the message to continue; no chat contains these letters."""
_KEPT = " "
"""Text after the mark. Templates that trim messages drop it."""
_MAX_REASON = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """Options for rendering a chat, in vLLM's names."""

    add_generation_prompt: bool = True
    """Open the assistant's turn at the end."""
    continue_final_message: bool = False
    """Leave the last message open, so that the model continues it."""
    chat_template: str | None = None
    """Jinja source, or the name of one of the model's templates, instead of the default."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """More names for the template, such as ``enable_thinking``."""
    tools: Sequence[Mapping[str, Any]] | None = None
    """Tool definitions in OpenAI's form."""
    documents: Sequence[Mapping[str, Any]] | None = None

    def verify(self) -> ChatOptions:
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidParameter(
                "continue_final_message",
                True,
                "only together with add_generation_prompt=false: one continues the last message, "
                "the other opens a new one",
            )
        return self


class Isolated(Protocol):
    """Renderer of templates from clients (see ``isolated_templates``)."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: ChatOptions,
        named_tokens: Mapping[str, str],
    ) -> str: ...


class ChatTemplates:
    """The chat templates of one model."""

    def __init__(self, sources: Mapping[str, str], named_tokens: Mapping[str, str]) -> None:
        self._sources = dict(sources)
        self._named_tokens = dict(named_tokens)
        self.isolated: Isolated | None = None
        """Renderer of templates that are not the model's; None if callers are trusted."""

    def __bool__(self) -> bool:
        """Return whether the model has a template."""
        return bool(self._sources)

    @property
    def text(self) -> str:
        return "\n".join(self._sources.values())

    def render(
        self, messages: Sequence[Mapping[str, Any]], options: ChatOptions | None = None
    ) -> str:
        """Return the prompt of a chat, special tokens included. Raises InvalidParameter."""
        options = (options if options is not None else ChatOptions()).verify()
        isolated = self.isolated
        if isolated is not None and options.chat_template not in (None, *self._sources):
            return isolated.render(messages, options, self._named_tokens)
        source = self._choose(options)
        template = self._compiled(source)
        plain = plain_messages(messages)
        if options.tools and knows_no_tools(source):
            plain = in_words(plain, options.tools)
        plain = fitted(plain, template.traits)
        if options.continue_final_message:
            _mark_last(plain)
        names = {
            **self._named_tokens,
            **options.template_kwargs,
            "messages": plain,
            "tools": options.tools,
            "documents": options.documents,
            "add_generation_prompt": options.add_generation_prompt,
        }
        text = template.render(names)
        return _cut_at_mark(text) if options.continue_final_message else text

    def names_of(self, options: ChatOptions) -> frozenset[str]:
        """Return the free names of the template, which are the options that have an effect.

        Raises InvalidParameter.
        """
        source = self._choose(options)
        names = self._compiled(source).names
        return names | {"tools"} if knows_no_tools(source) else names

    def learn(self) -> None:
        """Find the traits of the model's templates in advance.

        Errors of a template are raised by the requests that use it.
        """
        for source in self._sources.values():
            with suppress(InvalidParameter):
                self._compiled(source).traits.learn()

    def _compiled(self, source: str) -> _Template:
        return _compile(source, tuple(self._named_tokens.items()))

    def _choose(self, options: ChatOptions) -> str:
        if options.chat_template is not None:
            return self._sources.get(options.chat_template, options.chat_template)
        if options.tools and TOOL_TEMPLATE in self._sources:
            return self._sources[TOOL_TEMPLATE]
        source = self._sources.get(DEFAULT_TEMPLATE)
        if source is None:
            raise InvalidParameter(
                "chat_template", None, "a template must be given: this model has none"
            )
        return source


class _Template:
    """Compiled source and its traits."""

    def __init__(self, source: str, named_tokens: Mapping[str, str]) -> None:
        environment = template_environment()
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise InvalidParameter("chat_template", source, f"Jinja; {_reason(error)}") from error
        self.names = frozenset(meta.find_undeclared_variables(tree))
        self._named_tokens = named_tokens
        tests = tree.find_all(nodes.Test)
        self.traits = TemplateTraits(
            self._rendered,
            names_developer="developer" in source,
            asks_for_none=any(each.name == "none" and _is_content(each.node) for each in tests),
        )

    def render(self, names: dict[str, Any]) -> str:
        try:
            return self._template.render(names)
        except Exception as error:
            # A template may raise anything.
            raise InvalidParameter(
                "messages", names["messages"], f"the chat template refuses them: {_reason(error)}"
            ) from error

    def _rendered(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None
    ) -> str | None:
        names = {**self._named_tokens, "messages": messages, "tools": tools, "documents": None}
        with suppress(InvalidParameter):
            return self.render({**names, "add_generation_prompt": False})
        return None


def _reason(error: Exception) -> str:
    reason = str(error) or type(error).__name__
    return reason if len(reason) <= _MAX_REASON else f"{reason[:_MAX_REASON]}..."


@lru_cache(maxsize=32)
def _compile(source: str, named_tokens: tuple[tuple[str, str], ...]) -> _Template:
    return _Template(source, dict(named_tokens))


def _is_content(node: nodes.Node) -> bool:
    if isinstance(node, nodes.Filter) and node.node is not None:
        return _is_content(node.node)
    if isinstance(node, nodes.CondExpr):
        return _is_content(node.expr1)
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    return (
        isinstance(node, nodes.Getitem)
        and isinstance(node.arg, nodes.Const)
        and node.arg.value == "content"
    )


def _mark_last(messages: list[Message]) -> None:
    last = messages[-1]
    content = last.get("content")
    if isinstance(content, str):
        last["content"] = content + _CONTINUED + _KEPT
        return
    texts = [part for part in content or () if isinstance(part, dict) and "text" in part]
    if not texts:
        raise InvalidParameter(
            "continue_final_message", True, "a last message with text to continue"
        )
    last["content"] = [
        {**part, "text": part["text"] + _CONTINUED + _KEPT} if part is texts[-1] else part
        for part in content or ()
    ]


def _cut_at_mark(text: str) -> str:
    end = text.rfind(_CONTINUED)
    if end < 0:
        raise InvalidParameter(
            "continue_final_message", True, "a chat template that keeps the last message's text"
        )
    is_kept = text.startswith(_KEPT, end + len(_CONTINUED))
    return text[:end] if is_kept else text[:end].rstrip()
