"""Hints: fields that clients send and that change no answer.

They are accepted, reported in the header ``x-tandem-ignored`` and counted.
docs/reference/parameters.md is made from these tables.
"""

from __future__ import annotations

import logging
import re
from collections.abc import (
    Callable,
    Iterable,
    Mapping,
    MutableMapping,
)
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from tandem.protocol.errors import InvalidParameter
from tandem.router.api.openai.bodies.parameters import same
from tandem.router.http.errors import shortened

logger = logging.getLogger(__name__)

MAX_NAMES = 64
"""Maximum names that are logged."""
MAX_LENGTH = 64
"""Maximum characters of a name that are shown."""


class UnknownFields:
    """Policy for unknown fields: refuse or ignore."""

    def __init__(self, *, ignored: bool = False) -> None:
        self._ignored = ignored
        self._seen: set[str] = set()

    def meet(self, prefix: str, name: str, value: object, known: Iterable[str]) -> None:
        """Raise InvalidParameter for ``prefix + name``, or ignore it."""
        field = prefix + shortened(name, MAX_LENGTH)
        if not self._ignored:
            near = get_close_matches(name[:MAX_LENGTH], list(known), n=1)
            hint = f"; did you mean {prefix}{near[0]}?" if near else ""
            raise InvalidParameter(field, value, f"no parameter has this name{hint}")
        if field not in self._seen and len(self._seen) < MAX_NAMES:
            self._seen.add(field)
            logger.warning("unknown field %s in a request is ignored", ascii(field))


STATE = "ignored"
"""Key of ignored hints in a request's state."""
_INDEX = re.compile(r"\[\d+\]")


class Reading:
    """Notes of one body."""

    def __init__(self, unknown: UnknownFields | None = None) -> None:
        self._unknown = UnknownFields() if unknown is None else unknown
        self.ignored: dict[str, None] = {}
        """Names of hints without effect, in order."""

    def meet(self, prefix: str, name: str, value: object, known: Iterable[str]) -> None:
        """Raise InvalidParameter for an unknown field, or ignore it."""
        self._unknown.meet(prefix, name, value, known)

    def ignore(self, name: str) -> None:
        """Note a hint by this server's name for it."""
        self.ignored[_INDEX.sub("", name)] = None


def note_ignored(scope: MutableMapping[str, Any], names: Iterable[str]) -> None:
    """Report hints without effect in the answer to a request."""
    scope["state"].setdefault(STATE, {}).update(dict.fromkeys(names))


_KINDS: Mapping[type, tuple[str, str]] = {
    bool: ("boolean", "true or false"),
    int: ("integer", "an integer"),
    str: ("string", "a text"),
    list: ("array", "a list"),
    dict: ("object", "an object"),
}
"""Names of kinds of values, in JSON Schema and in errors."""


@dataclass(frozen=True, slots=True)
class Hint:
    """Reason why a field changes no answer, and its values."""

    why: str
    kinds: tuple[type, ...] = ()
    """Kinds of values; if empty, the body's own type checks them."""
    neutral: tuple[object, ...] = ()
    """Values that are not reported."""
    fits: Callable[[Any], bool] | None = None
    """Returns False for a value that requires an effect."""
    allowed: str = ""
    """Values that fit, as text."""

    def check(self, name: str, value: object, reading: Reading) -> None:
        """Note a value without effect.

        Raises InvalidParameter for another kind, or a value that requires an effect.
        """
        if value is None or any(same(value, each) for each in self.neutral):
            return
        if self.kinds and type(value) not in self.kinds:
            raise InvalidParameter(name, value, f"{self.accepted}: {self.why}")
        if self.fits is not None and not self.fits(value):
            raise InvalidParameter(name, value, f"{self.accepted}: {self.why}")
        reading.ignore(name)

    @property
    def accepted(self) -> str:
        return self.allowed or " or ".join(_KINDS[each][1] for each in self.kinds)

    def schema(self) -> dict[str, Any]:
        """Return the JSON Schema of accepted values."""
        described = {"description": f"No effect: {self.why}."}
        if self.fits is not None:
            return {"enum": [*self.neutral, None], **described}
        kinds = [{"type": _KINDS[each][0]} for each in self.kinds]
        return {"anyOf": [*kinds, {"type": "null"}], **described}


_CALLER = "it is about the caller"
_SHORT = "a text of at most 512 characters"
_CACHE = "prefixes are cached while there is room"
_TIER = "there is one tier"
_ALL_LOADED = "the model sees all tools at once"
_CLIENTS = "tools are functions that the client runs"

_COMMON: Mapping[str, Hint] = {
    "user": Hint(_CALLER, allowed=_SHORT),
    "safety_identifier": Hint(_CALLER, allowed=_SHORT),
    "metadata": Hint(_CALLER, allowed="up to 16 texts of 512 characters under names of 64"),
    "client_metadata": Hint(_CALLER, (dict,)),
    "prompt_cache_key": Hint("prefixes are found by their tokens", allowed=_SHORT),
    "prompt_cache_retention": Hint(_CACHE, (str,), ("in_memory", "in-memory")),
    "prompt_cache_options": Hint(_CACHE, (dict,), ({},)),
    "service_tier": Hint(_TIER, (str,), ("auto", "default")),
}
"""Hints of chats, completions and responses."""

GENERATION: Mapping[str, Hint] = {
    **_COMMON,
    "session_id": Hint(_CALLER, allowed=_SHORT),
    "store": Hint("answers of chats and completions are not stored", (bool,), (False,)),
}

CHAT: Mapping[str, Hint] = {
    **GENERATION,
    "prediction": Hint("it only makes answers faster", (dict,)),
    "verbosity": Hint("request it in a message", (str,), ("medium",)),
    "web_search_options": Hint("this server has no search", (dict,)),
}

COMPLETION: Mapping[str, Hint] = GENERATION

STREAM_OPTIONS: Mapping[str, Hint] = {
    "include_obfuscation": Hint("chunks are not padded", (bool,), (False,)),
}

POOLED: Mapping[str, Hint] = {"user": Hint(_CALLER, allowed=_SHORT)}


def _is_stream_options(value: Mapping[str, Any]) -> bool:
    known = value.keys() <= {"include_obfuscation", "include_usage"}
    padded = value.get("include_obfuscation") in (None, True, False)
    return known and padded and value.get("include_usage") in (None, True)


RESPONSES: Mapping[str, Hint] = {
    **_COMMON,
    "max_tool_calls": Hint("this server runs no tools of its own", (int,)),
    "stream_options": Hint(
        "events are not padded, and the last one has the usage",
        (dict,),
        (
            *({}, {"include_obfuscation": False}, {"include_usage": True}),
            {"include_obfuscation": False, "include_usage": True},
        ),
        _is_stream_options,
        "include_obfuscation, and include_usage: true",
    ),
}
RESPONSE_TEXT: Mapping[str, Hint] = {
    "verbosity": Hint("request it in a message", (str,), ("medium",))
}
_WHOLE = "reasoning is given whole, as the model wrote it"
RESPONSE_REASONING: Mapping[str, Hint] = {
    "summary": Hint(_WHOLE, (str,)),
    "generate_summary": Hint(_WHOLE, (str,)),
}
RESPONSE_TOOL: Mapping[str, Hint] = {
    "defer_loading": Hint(_ALL_LOADED, (bool,), (False,)),
    "output_schema": Hint("results of calls are texts", (dict,)),
}
RESPONSE_ITEM: Mapping[str, Hint] = {
    "encrypted_content": Hint("reasoning is not encrypted", (str,)),
    "phase": Hint("answers have one phase", (str,)),
    "namespace": Hint(_CLIENTS, (str,)),
    "caller": Hint(_CLIENTS, (dict,)),
}

INCLUDES = frozenset(
    {
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
        "reasoning.encrypted_content",
        "web_search_call.action.sources",
        "web_search_call.results",
    }
)
"""Values of ``include`` without effect."""

HOSTED_ITEMS = frozenset(
    {
        *("code_interpreter_call", "file_search_call", "image_generation_call", "mcp_call"),
        *("mcp_list_tools", "tool_search_call", "tool_search_output", "web_search_call"),
    }
)
"""Items of hosted tools of other providers."""


def _keeps_all(value: Mapping[str, Any]) -> bool:
    edits = value.get("edits") or []
    return value.keys() <= {"edits"} and isinstance(edits, list) and all(map(_keeps, edits))


def _keeps(edit: object) -> bool:
    if not isinstance(edit, Mapping):
        return False
    clears_thoughts = re.fullmatch(r"clear_thinking_\d+", str(edit.get("type"))) is not None
    return clears_thoughts and edit.get("keep") in ("all", {"type": "all"})


COUNT: Mapping[str, Hint] = {
    "cache_control": Hint("prefixes are always cached", allowed="an object"),
    "context_management": Hint(
        "histories are the client's",
        (dict,),
        ({}, {"edits": []}),
        _keeps_all,
        'edits that keep everything ("clear_thinking_..." with "keep": "all")',
    ),
    "mcp_servers": Hint("tools are run by the client", (list,), ([],)),
    "speed": Hint("there is one speed", (str,), ("standard",)),
    "user_profile_id": Hint(_CALLER, (str,)),
}
MESSAGES: Mapping[str, Hint] = {
    **COUNT,
    "diagnostics": Hint("this server has none", (dict,)),
    "metadata": Hint(_CALLER, allowed="`user_id`: a text of at most 512 characters"),
    "service_tier": Hint(_TIER, (str,), ("auto", "standard_only")),
}
MESSAGE_TOOL: Mapping[str, Hint] = {
    "cache_control": COUNT["cache_control"],
    "defer_loading": Hint(_ALL_LOADED, (bool,), (False,)),
    "eager_input_streaming": Hint(
        "arguments are returned as the model writes them", (bool,), (True,)
    ),
    "input_examples": Hint("describe them in the description", (list,), ([],)),
}
THINKING: Mapping[str, Hint] = {
    "display": Hint("reasoning is given whole, as the model wrote it", (str,)),
}

HOSTED = frozenset(
    {
        *("apply_patch", "advisor", "bash", "code_execution", "code_interpreter", "computer"),
        *("computer_use_preview", "custom", "file_search", "image_generation", "local_shell"),
        *("mcp", "mcp_toolset", "memory", "namespace", "programmatic_tool_calling", "shell"),
        *("text_editor", "tool_search", "tool_search_tool_bm25", "tool_search_tool_regex"),
        *("web_fetch", "web_search", "web_search_preview"),
    }
)
"""Known tools that this server does not offer to the model."""
_DATED = re.compile(r"_\d{8}$|_\d{4}_\d{2}_\d{2}$")


def ignore_tool(kind: str, reading: Reading) -> None:
    """Note a tool that is not offered; ``kind`` is the client's text."""
    plain = _DATED.sub("", kind[:64])
    reading.ignore(f"tools.{plain if plain in HOSTED else 'other'}")


CONDITIONS: Mapping[str, tuple[str, Hint]] = {
    "reasoning_effort": (
        "chat",
        Hint("the chat template reads no effort", allowed="an effort"),
    ),
    "reasoning.effort": (
        "responses",
        Hint("the chat template reads no effort", allowed="an effort of chats"),
    ),
    "output_config.effort": (
        "messages, count_tokens",
        Hint("the chat template reads no effort", allowed="`low` to `max`"),
    ),
    "thinking": (
        "messages, count_tokens",
        Hint("the chat template reads no effort", allowed='the type `"enabled"`'),
    ),
    "tools[].type": (
        "chat, responses, messages, count_tokens",
        Hint(
            "the model is offered functions that the client runs; reported as `tools.TYPE`",
            allowed="any type, unless `tool_choice` demands such a tool",
        ),
    ),
    "tools[].strict": (
        "chat, responses, messages",
        Hint(
            "no grammar holds this model's calls to this schema; arguments are best effort",
            allowed="`true`",
        ),
    ),
    "input[].type": (
        "responses",
        Hint(
            "items of hosted tools are left out; reported as `input.TYPE`",
            allowed=", ".join(f"`{each}`" for each in sorted(HOSTED_ITEMS)),
        ),
    ),
    "include": (
        "responses",
        Hint("no answer has it", allowed=", ".join(f"`{each}`" for each in sorted(INCLUDES))),
    ),
    "messages[].content[].cache_control": (
        "messages, count_tokens",
        Hint("prefixes are always cached", allowed="an object"),
    ),
    "messages[].content[].redacted_thinking": (
        "messages, count_tokens",
        Hint("thoughts are not encrypted", allowed="a block of this type"),
    ),
}
"""Hints without effect for some models or values: name to its APIs and the reason."""
