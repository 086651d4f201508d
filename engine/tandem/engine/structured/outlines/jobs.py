"""What is asked of a compile process, out of what a client asks for."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from tandem.engine.structured.grammar import GrammarError
from tandem.engine.structured.outlines.characters import quoted
from tandem.engine.structured.outlines.expressions import read_whole
from tandem.engine.structured.outlines.schemas import followed
from tandem.protocol.structured import StructuredOutputsParams

MAX_EXPRESSION_BYTES = 1 << 20
"""Of the expression that outlines-core makes of a schema."""
MAX_SCHEMA_BYTES = 1 << 20
"""Of a schema as outlines-core gets it, references written out."""
WHITESPACE = "[ ]?"
"""Between tokens of JSON unless the client says what: each sign more is a state more of each place
where it may stand."""
KINDS = ("choice", "regex", "json", "json_object")


class Limits(msgspec.Struct, frozen=True):
    """What a compile process may take."""

    memory_bytes: int
    """Of addresses."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One expression to compile."""

    expression: str = ""
    """In the regex crate's words; empty where it is made of a schema."""
    schema: str | None = None
    """In outlines-core's words, as text."""
    whitespace: str = WHITESPACE
    """Of JSON: what may stand between its tokens, an expression."""
    seconds: float = 0.0
    """Processor time."""


def job_of(wanted: StructuredOutputsParams) -> Job:
    """Raises GrammarError, in words for whoever wrote it, for what is not followed."""
    if wanted.kind not in KINDS:
        raise GrammarError(
            f"one of {', '.join(KINDS)} in its place: {wanted.kind} is followed by guidance alone, "
            "and this worker has outlines"
        )
    if wanted.reasoning is not None:
        raise GrammarError(
            "asked of a model without reasoning, or with it off: outlines follows no thought "
            "before an answer"
        )
    match wanted.kind:
        case "choice":
            return Job(expression="|".join(map(quoted, wanted.choice or ())))
        case "regex":
            return Job(expression=read_whole(wanted.regex or "").text)
        case _:
            schema: Any = {"type": "object"} if wanted.json is None else json.loads(wanted.json)
            return Job(schema=_text(followed(schema)), whitespace=_whitespace(wanted))


def _text(schema: Any) -> str:
    """A schema as JSON; no more than may be is written, for references multiply."""
    parts: list[str] = []
    left = MAX_SCHEMA_BYTES
    for part in json.JSONEncoder().iterencode(schema):
        left -= len(part)
        if left < 0:
            raise GrammarError(
                f"a schema of at most {MAX_SCHEMA_BYTES:,} bytes, its references written out"
            )
        parts.append(part)
    return "".join(parts)


def _whitespace(wanted: StructuredOutputsParams) -> str:
    if wanted.disable_any_whitespace:
        return ""
    if wanted.whitespace_pattern is None:
        return WHITESPACE
    return read_whole(wanted.whitespace_pattern).text
