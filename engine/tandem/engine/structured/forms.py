"""Conversion of a client's form to a grammar of the backend."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import llguidance

from tandem.engine.structured.errors import GrammarError
from tandem.engine.structured.rewrite import followed
from tandem.engine.structured.tags import TagGrammar
from tandem.protocol.structured import StructuredOutputsParams

WHITESPACE = r"[ \n\r\t]{0,48}"
"""Between tokens of JSON unless the client says what: some models would write it for ever."""
OPTIONS = "x-guidance"
"""Key of a schema by which the backend would be told to be lenient."""
_BLANKS = r"[ \n\r\t]{0,8}"
"""Between a thought and the answer."""
_from_schema: Callable[..., str] = llguidance.LLMatcher.grammar_from_json_schema


def grammar_text(wanted: StructuredOutputsParams, special_ids: Mapping[str, int]) -> str:
    """The grammar of all answers that are ``wanted``, for the backend. Raises GrammarError.

    ``special_ids``: the model's special tokens by their texts.
    """
    if wanted.reasoning is None and wanted.structural_tag is None:
        return _alone(wanted)
    tags = TagGrammar(
        special_ids,
        of_schema=lambda schema: json.dumps(_with_options(schema, wanted)),
        of_regex=llguidance.regex_to_lark,
        of_lark=_lark,
    )
    answer = _in_tags(wanted, tags)
    span = wanted.reasoning
    if span is None:
        return tags.whole(answer)
    thought = f"{tags.until(span.close)} {tags.regex(_BLANKS)}"
    if span.opens:
        opened = " | ".join(tags.literal(each) for each in span.opens)
        thought = tags.optional(f"({opened}) {thought}")
    return tags.whole(f"{thought} {answer}")


def _alone(wanted: StructuredOutputsParams) -> str:
    match wanted.kind:
        case "choice":
            return llguidance.LLMatcher.grammar_from_regex(_regex_of_choice(wanted))
        case "regex":
            return llguidance.LLMatcher.grammar_from_regex(wanted.regex or "")
        case "grammar":
            return llguidance.LLMatcher.grammar_from_lark(_lark(wanted.grammar or ""))
        case _:
            return _from_schema(json.dumps(_with_options(_schema(wanted), wanted)))


def _in_tags(wanted: StructuredOutputsParams, tags: TagGrammar) -> str:
    """The answer as an expression."""
    match wanted.kind:
        case "choice":
            return f"({' | '.join(tags.literal(each) for each in wanted.choice or ())})"
        case "regex":
            return tags.regex(wanted.regex or "")
        case "grammar":
            return tags.grammar(wanted.grammar or "")
        case "structural_tag":
            return tags.structural_tag(json.loads(wanted.structural_tag or "{}"))
        case _:
            return tags.schema(_schema(wanted))


def _regex_of_choice(wanted: StructuredOutputsParams) -> str:
    return "|".join(map(re.escape, wanted.choice or ()))


def _schema(wanted: StructuredOutputsParams) -> Any:
    return {"type": "object"} if wanted.json is None else json.loads(wanted.json)


def _with_options(schema: Any, wanted: StructuredOutputsParams) -> dict[str, Any]:
    """A schema that backends follow, and what may stand between its tokens."""
    if schema is False:
        raise GrammarError("a schema that some value matches")
    if schema is True:
        schema = {}
    if OPTIONS in schema:
        raise GrammarError(f"without {OPTIONS} at /, which is the backend's own")
    options: dict[str, object] = (
        {"whitespace_flexible": False}
        if wanted.disable_any_whitespace
        else {"whitespace_pattern": wanted.whitespace_pattern or WHITESPACE}
    )
    return {**followed(schema), OPTIONS: options}


def _lark(text: str) -> str:
    if "::=" in text:
        raise GrammarError("in Lark's syntax, `rule: ...`; GBNF and EBNF with `::=` are not read")
    if OPTIONS in text:
        raise GrammarError(f"without {OPTIONS}, which is the backend's own")
    return text
