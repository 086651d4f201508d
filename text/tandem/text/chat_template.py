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
from tandem.text.chat_messages import Message, in_words, knows_no_tools, plain_messages
from tandem.text.chat_turns import in_turns, with_form
from tandem.text.folder import DEFAULT_TEMPLATE, TOOL_TEMPLATE
from tandem.text.template_traits import CALLS, INVALID, TemplateTraits


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
