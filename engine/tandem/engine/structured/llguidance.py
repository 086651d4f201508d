"""Grammars by llguidance: masks by walking the vocabulary's trie, 50 us to some milliseconds each.

All of a grammar is bounded by limits of its own: what compiles or steps beyond them is an error in
words. Copies share the states of a lexer, and wait for each other's masks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import llguidance
import msgspec

from tandem.engine.structured.grammar import GrammarError, NoCompiler
from tandem.engine.structured.rewrite import followed
from tandem.engine.structured.schema import place_of
from tandem.protocol.structured import JSON_KINDS, StructuredOutputsParams

LEXER_STATES = 20_000
"""Of one text, at most; 1 to 2 kB each."""
WHITESPACE = r"[ \n\r\t]{0,48}"
"""Between tokens of JSON unless the client says what: some models would write it for ever."""
OPTIONS = "x-guidance"
"""Key of a schema by which the backend would be told to be lenient."""
_from_schema: Callable[..., str] = llguidance.LLMatcher.grammar_from_json_schema
_ANY_OBJECT = '{"type":"object"}'


class LLGuidanceGrammar:
    """Implements Grammar over one matcher."""

    def __init__(self, matcher: llguidance.LLMatcher, ends: Sequence[int]) -> None:
        self._matcher = matcher
        self._ends = ends
        """What the backend takes for ends; they are the caller's to add."""

    def accept(self, token_ids: Sequence[int]) -> None:
        """See Grammar."""
        if not self._matcher.consume_tokens(list(token_ids)):
            raise self._error()

    def fill(self, words: memoryview) -> None:
        """See Grammar."""
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise self._error()
        words[:] = mask[: len(words)].ljust(len(words), b"\0")
        for token in self._ends:
            if token < 8 * len(words):
                words[token // 8] &= ~(1 << token % 8)

    @property
    def is_accepting(self) -> bool:
        """See Grammar."""
        return self._matcher.is_accepting()

    @property
    def is_terminated(self) -> bool:
        """See Grammar."""
        return self._matcher.is_stopped()

    def rollback(self, num_tokens: int) -> None:
        """See Grammar."""
        if not self._matcher.rollback(num_tokens):
            raise self._error()

    def reset(self) -> None:
        """See Grammar."""
        if not self._matcher.reset():
            raise self._error()

    def copy(self) -> LLGuidanceGrammar:
        """See Grammar."""
        return LLGuidanceGrammar(self._matcher.deep_copy(), self._ends)

    def _error(self) -> GrammarError:
        return GrammarError(_words(self._matcher.get_error()))


class LLGuidanceCompiler:
    """Implements Compiler for the tokenizer.json of a prepared folder."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        """Reads the tokenizer: half a second for a vocabulary of 50,000. Raises NoCompiler where
        it cannot be used."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise NoCompiler(f"{folder.name} has no tokenizer.json")
        try:
            tokenizer = llguidance.LLTokenizer(str(path))
            if tokenizer.vocab_size < vocab_size:
                tokenizer = llguidance.LLTokenizer(str(path), n_vocab=vocab_size)
        except Exception as error:  # a Rust library: anything may come
            raise NoCompiler(f"tokenizer.json: {error}") from error
        self._tokenizer = tokenizer
        self._limits = llguidance.LLParserLimits(
            max_lexer_states=LEXER_STATES, verbose_errors=False
        )

    def compile(self, kind: str, text: str) -> LLGuidanceGrammar:
        """See Compiler."""
        grammar = _FORMS[kind](text)
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if matcher.is_error():
            error = matcher.get_error()
            raise GrammarError(
                _words_of_schema(error, text) if kind in JSON_KINDS else _words(error)
            )
        return LLGuidanceGrammar(matcher, self._tokenizer.eos_tokens)


def _of_choice(text: str) -> str:
    return llguidance.LLMatcher.grammar_from_regex("|".join(map(re.escape, json.loads(text))))


def _of_json(text: str) -> str:
    wanted = msgspec.json.decode(text, type=StructuredOutputsParams)
    schema = wanted.json if wanted.json is not None else _ANY_OBJECT
    whole = json.loads(schema)
    if whole is False:
        raise GrammarError("a schema that some value matches")
    if whole is True:
        schema = "{}"
    elif OPTIONS in whole:
        raise GrammarError(f"without {OPTIONS} at /, which is the backend's own")
    schema = json.dumps(followed(json.loads(schema)))
    if wanted.disable_any_whitespace:
        return _from_schema(schema, overrides={"whitespace_flexible": False})
    return _from_schema(
        schema, overrides={"whitespace_pattern": wanted.whitespace_pattern or WHITESPACE}
    )


def _of_lark(text: str) -> str:
    if "::=" in text:
        raise GrammarError("in Lark's syntax, `rule: ...`; GBNF and EBNF with `::=` are not read")
    if OPTIONS in text:
        raise GrammarError(f"without {OPTIONS}, which is the backend's own")
    return llguidance.LLMatcher.grammar_from_lark(text)


_FORMS: dict[str, Callable[[str], str]] = {
    "choice": _of_choice,
    "regex": llguidance.LLMatcher.grammar_from_regex,
    "json": _of_json,
    "json_object": _of_json,
    "grammar": _of_lark,
}


def _words_of_schema(error: str, text: str) -> str:
    """The backend's words, and where in the schema the keyword stands that it does not know."""
    unknown = re.match(r"Unimplemented keys: \[(.*)\]", error)
    if unknown is None:
        return f"a schema that can be followed: {_words(error)}"
    keys = json.loads(f"[{unknown[1]}]")
    schema = json.loads(msgspec.json.decode(text, type=StructuredOutputsParams).json or "{}")
    places = [f"{key} at {place}" for key in keys if (place := place_of(key, schema)) is not None]
    return f"a schema without {', '.join(places or keys)}, which no backend here follows"


def _words(error: str) -> str:
    """The backend's words in a line, without the text that the caller knows."""
    line = " ".join(error.partition("\n<")[0].split())
    said = re.sub(r"^at \d+\(\d+\): invalid regex .*? \(in regex\): ", "", line)
    if said.startswith("NoExtension"):
        return "no text matches"
    return said.partition(" 1 | start:")[0][:300] or "no grammar"
