"""Structural tags: free text with parts of a given form, as one grammar in Lark's syntax.

Formats are those of XGrammar's structural tags, as in vLLM, and the older ``structures`` with
``triggers``. A special token's text may be written by the token or letter by letter.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import llguidance

from tandem.engine.structured.errors import GrammarError
from tandem.engine.structured.rewrite import followed
from tandem.protocol.structured import MAX_TAG_ELEMENTS, StructuredOutputsParams

_TEXT = "TEXT"


class TagGrammar:
    """Writer of one grammar. Methods return expressions for a rule."""

    def __init__(
        self,
        special_ids: Mapping[str, int],
        *,
        of_schema: Callable[[Any], str],
        of_regex: Callable[[str], str],
        of_lark: Callable[[str], str],
    ) -> None:
        """``special_ids`` are special tokens by their texts. The functions return a schema as JSON,
        an expression between slashes, and a checked grammar."""
        self._special_ids = special_ids
        self._specials = _any_of(tuple(special_ids))
        self._of_schema = of_schema
        self._of_regex = of_regex
        self._of_lark = of_lark
        self._rules = [f"{_TEXT}: /(.|\\n)*/"]
        self._inner: list[str] = []
        self._left = MAX_TAG_ELEMENTS
        self._makers: dict[str, Callable[[Mapping[str, Any], str], str]] = {
            "const_string": lambda form, at: self.literal(_text(form, "value", at)),
            "json_schema": lambda form, at: self.schema(_given(form, "json_schema", at)),
            "regex": lambda form, at: self.regex(_text(form, "pattern", at)),
            "grammar": lambda form, at: self.grammar(_text(form, "grammar", at)),
            "any_text": lambda form, at: self.any_text(),
            "sequence": self._sequence,
            "or": self._or,
            "tag": self._tag,
            "triggered_tags": self._triggered_tags,
            "tags_with_separator": self._tags_with_separator,
        }

    def whole(self, expression: str) -> str:
        lark = "\n".join([f"start: {expression}", *self._rules])
        if not self._inner:
            return lark
        grammars = [{"name": "tags", "lark_grammar": lark}]
        grammars += [
            {"name": f"g{at}", "lark_grammar": text} for at, text in enumerate(self._inner)
        ]
        return json.dumps({"grammars": grammars})

    def literal(self, text: str) -> str:
        """Return ``text``, with special tokens in it by the token or by letters."""
        parts: list[str] = []
        end = 0
        for found in self._specials.finditer(text):
            if found.start() > end:
                parts.append(_quoted(text[end : found.start()]))
            parts.append(f"(<[{self._special_ids[found[0]]}]> | {_quoted(found[0])})")
            end = found.end()
        if end < len(text):
            parts.append(_quoted(text[end:]))
        return " ".join(parts) or '""'

    def until(self, text: str) -> str:
        """Return any text up to the first ``text``, included."""
        lazy = self._rule(f"{_TEXT} {_quoted(text)}", "[lazy]")
        special = self._specials.match(text)
        if special is None:
            return lazy
        rest = self.literal(text[special.end() :]) if special.end() < len(text) else ""
        return f"({_TEXT} <[{self._special_ids[special[0]]}]> {rest} | {lazy})"

    def any_text(self) -> str:
        """Return any text to the end of the answer, without special tokens."""
        return _TEXT

    def schema(self, schema: Any) -> str:
        if not isinstance(schema, Mapping | bool):
            raise GrammarError(f"a JSON schema in the place of {_shown(schema)}")
        return f"%json {self._of_schema(schema)}"

    def regex(self, pattern: str) -> str:
        return f"/{self._of_regex(pattern)}/"

    def grammar(self, lark: str) -> str:
        self._inner.append(self._of_lark(lark))
        return f"@g{len(self._inner) - 1}"

    def of(self, form: Any, at: str) -> str:
        """Return any format; ``at`` is its place, for errors. Raises GrammarError."""
        self._count(1)
        if not isinstance(form, Mapping):
            raise GrammarError(f"an object at {at}, not {_shown(form)}")
        make = self._makers.get(str(form.get("type")))
        if make is None:
            allowed = ", ".join(self._makers)
            raise GrammarError(f"a type at {at} of {allowed}, not {_shown(form.get('type'))}")
        return make(form, at)

    def structural_tag(self, tag: Any) -> str:
        """Return a whole structural tag, of either form. Raises GrammarError."""
        if not isinstance(tag, Mapping):
            raise GrammarError(f"an object, not {_shown(tag)}")
        if tag.get("type", "structural_tag") != "structural_tag":
            raise GrammarError(f'"structural_tag" for its type, not {_shown(tag["type"])}')
        if "format" in tag:
            return self.of(tag["format"], "/format")
        tags = [
            {
                "begin": _text(each, "begin", f"/structures/{at}"),
                "content": {"type": "json_schema", "json_schema": each.get("schema", True)},
                "end": _text(each, "end", f"/structures/{at}"),
            }
            for at, each in enumerate(_list(tag, "structures", ""))
        ]
        return self._triggered_tags({"triggers": _list(tag, "triggers", ""), "tags": tags}, "")

    def optional(self, expression: str) -> str:
        return f"({expression})?"

    def _count(self, elements: int) -> None:
        self._left -= elements
        if self._left < 0:
            raise GrammarError(
                f"at most {MAX_TAG_ELEMENTS:,} formats, nested and next to each other"
            )

    def _rule(self, expression: str, attributes: str = "") -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {expression}")
        return name

    def _sequence(self, form: Mapping[str, Any], at: str) -> str:
        elements = _list(form, "elements", at)
        for index, each in enumerate(elements[:-1]):
            if isinstance(each, Mapping) and each.get("type") in ("any_text", "triggered_tags"):
                where = f"{at}/elements/{index}"
                raise GrammarError(f"{each['type']} at {where} last in its sequence, or in a tag")
        made = [self.of(each, f"{at}/elements/{i}") for i, each in enumerate(elements)]
        return self._rule(" ".join(made))

    def _or(self, form: Mapping[str, Any], at: str) -> str:
        elements = _list(form, "elements", at)
        made = [self.of(each, f"{at}/elements/{i}") for i, each in enumerate(elements)]
        return self._rule(" | ".join(made))

    def _tag(self, form: Mapping[str, Any], at: str) -> str:
        return self._rule(f"{self.literal(_text(form, 'begin', at))} {self._rest(form, at)}")

    def _rest(self, tag: Mapping[str, Any], at: str) -> str:
        content, end = _given(tag, "content", at), _text(tag, "end", at)
        if end and isinstance(content, Mapping) and content.get("type") == "any_text":
            return self.until(end)
        return f"{self.of(content, f'{at}/content')} {self.literal(end) if end else ''}"

    def _triggered_tags(self, form: Mapping[str, Any], at: str) -> str:
        triggers = [str(each) for each in _list(form, "triggers", at)]
        self._count(len(triggers))  # each tag is compared with all of them
        tags: dict[str, list[str]] = {}
        whole: list[str] = []
        for index, tag in enumerate(_list(form, "tags", at)):
            where = f"{at}/tags/{index}"
            begin = _text(tag, "begin", where)
            trigger = next((each for each in triggers if each and begin.startswith(each)), None)
            if trigger is None:
                raise GrammarError(f"a begin at {where} that starts with one of triggers")
            rest = self._rule(self._rest(tag, where))
            after = begin[len(trigger) :]
            tags.setdefault(trigger, []).append(f"{self.literal(after) if after else ''} {rest}")
            whole.append(f"{self.literal(begin)} {rest}")
        found = [
            self._rule(f"{self.until(trigger)} ({' | '.join(rests)})")
            for trigger, rests in tags.items()
        ]
        one, first = self._rule(" | ".join(found)), self._rule(" | ".join(whole))
        if form.get("stop_after_first"):
            return first if form.get("at_least_one") else self._rule(f"{one} | {_TEXT}")
        return self._rule(f"{first if form.get('at_least_one') else ''} {one}* {_TEXT}")

    def _tags_with_separator(self, form: Mapping[str, Any], at: str) -> str:
        tags = _list(form, "tags", at)
        made = [self._tag(each, f"{at}/tags/{index}") for index, each in enumerate(tags)]
        one = self._rule(" | ".join(made))
        separator = self.literal(_text(form, "separator", at))
        several = one if form.get("stop_after_first") else f"{one} ({separator} {one})*"
        return self._rule(several if form.get("at_least_one") else f"({several})?")


@lru_cache(maxsize=8)
def _any_of(texts: tuple[str, ...]) -> re.Pattern[str]:
    longest_first = sorted(filter(None, texts), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _given(form: Mapping[str, Any], name: str, at: str) -> Any:
    if name not in form:
        raise GrammarError(f"{name} at {at or '/'}")
    return form[name]


def _text(form: Any, name: str, at: str) -> str:
    if not isinstance(form, Mapping):
        raise GrammarError(f"an object at {at or '/'}, not {_shown(form)}")
    value = _given(form, name, at)
    if not isinstance(value, str):
        raise GrammarError(f"a text for {name} at {at or '/'}, not {_shown(value)}")
    return value


def _list(form: Mapping[str, Any], name: str, at: str) -> Sequence[Any]:
    value = _given(form, name, at)
    if not isinstance(value, list) or not value:
        raise GrammarError(f"a list that is not empty for {name} at {at or '/'}")
    return value


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


WHITESPACE = r"[ \n\r\t]{0,48}"
"""White space between tokens of JSON by default, bounded as some models would not stop."""
OPTIONS = "x-guidance"
"""Key of a schema that would make the backend lenient."""
_BLANKS = r"[ \n\r\t]{0,8}"
"""White space between a thought and the answer."""
_from_schema: Callable[..., str] = llguidance.LLMatcher.grammar_from_json_schema


def grammar_text(wanted: StructuredOutputsParams, special_ids: Mapping[str, int]) -> str:
    """Return the backend's grammar of all answers. Raises GrammarError.

    ``special_ids`` are the model's special tokens by their texts.
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
