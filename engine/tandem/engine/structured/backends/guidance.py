"""Grammars by llguidance, which makes masks by walking the vocabulary's trie.

Compiles and steps have limits; beyond them an error is raised. Copies share a lexer's states, and
wait for each other's masks.
"""

from __future__ import annotations

import ctypes
import json
import math
import re
from collections.abc import Iterator, Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import llguidance

from tandem.engine.structured.errors import ExhaustedError, GrammarError, NoBackend
from tandem.engine.structured.rewrite import place_of
from tandem.engine.structured.tags import grammar_text
from tandem.protocol.structured import JSON_KINDS, StructuredOutputsParams

MAX_REMAINDERS = 10_000
"""States of the automaton of all multiples in a schema together; about 0.5 s."""
_KEYWORD = "multipleOf"
_EMBEDDED = re.compile(r"%json\s*")


def check_multiples(wanted: StructuredOutputsParams) -> None:
    """Raise GrammarError if the multiples of a schema take too many states.

    All multiples count together, as parts may be combined.
    """
    for schema in _schemas_of(wanted):
        states = 1
        for value in _multiples(schema):
            states = math.lcm(states, _remainders(value))
            if states > MAX_REMAINDERS:
                raise GrammarError(
                    f"a schema that has values of {_KEYWORD} with a common multiple of at most "
                    f"{MAX_REMAINDERS:,}, factors of 2 and 5 left out"
                )


def _schemas_of(wanted: StructuredOutputsParams) -> Iterator[Any]:
    if wanted.json is not None:
        yield json.loads(wanted.json)
    if wanted.grammar is not None:
        yield from _embedded(wanted.grammar)
    if wanted.structural_tag is not None:
        tag = json.loads(wanted.structural_tag)
        yield tag
        for text in _texts(tag):
            yield from _embedded(text)


def _embedded(grammar: str) -> Iterator[Any]:
    decoder = json.JSONDecoder()
    for found in _EMBEDDED.finditer(grammar):
        try:
            yield decoder.raw_decode(grammar, found.end())[0]
        except (ValueError, RecursionError):
            continue


def _multiples(schema: Any) -> Iterator[float]:
    for each in _walked(schema):
        if isinstance(each, dict):
            value = each.get(_KEYWORD)
            if isinstance(value, int | float) and not isinstance(value, bool):
                yield value


def _texts(value: Any) -> Iterator[str]:
    return (each for each in _walked(value) if isinstance(each, str))


def _walked(value: Any) -> Iterator[Any]:
    left = [value]
    while left:
        each = left.pop()
        yield each
        if isinstance(each, dict):
            left += each.values()
        elif isinstance(each, list):
            left += each


def _remainders(value: float) -> int:
    """Return how many remainders matter: factors of 2 and 5 follow from the last digits."""
    try:
        digits = Decimal(repr(value)).as_tuple().digits
    except InvalidOperation:
        return 1
    number = int("".join(map(str, digits)))
    for factor in (2, 5):
        while number and number % factor == 0:
            number //= factor
    return max(1, number)


LEXER_STATES = 20_000
"""States of one matcher over all its answers, at most; 1 to 2 kB each."""
_EXHAUSTED = "too many states"
_LIMIT = re.compile(r"\btoo (many(?! digits)|big|large|deep)|\blimit\b|max is", re.IGNORECASE)
"""Texts of all errors of the library's limits."""
_PLACE = re.compile(r"^(?:parser|lexer|internal) error: ", re.IGNORECASE)


class GuidanceGrammar:
    """Grammar over one matcher."""

    def __init__(self, matcher: llguidance.LLMatcher, ends: Sequence[int], size: int) -> None:
        """``ends``: tokens of the library that end an answer, which the caller adds; ``size``:
        bytes of a mask of its vocabulary, which may differ from the model's."""
        self._matcher = matcher
        self._ends = ends
        self._size = size

    def accept(self, token_ids: Sequence[int]) -> None:
        if not self._matcher.consume_tokens(list(token_ids)):
            raise self._error()

    def fill(self, words: memoryview) -> None:
        if len(words) == self._size:
            place = (ctypes.c_char * len(words)).from_buffer(words)
            self._matcher.unsafe_compute_mask_ptr(ctypes.addressof(place), len(words))
        else:
            mask = self._matcher.compute_bitmask()
            words[:] = mask[: len(words)].ljust(len(words), b"\0")
        if self._matcher.is_error():
            raise self._error()
        for token in self._ends:
            if token < 8 * len(words):
                words[token // 8] &= ~(1 << token % 8)

    @property
    def is_accepting(self) -> bool:
        return self._matcher.is_accepting()

    @property
    def is_terminated(self) -> bool:
        return self._matcher.is_stopped()

    def copy(self) -> GuidanceGrammar:
        return GuidanceGrammar(self._matcher.deep_copy(), self._ends, self._size)

    def _error(self) -> GrammarError:
        error = self._matcher.get_error()
        return (ExhaustedError if _EXHAUSTED in error else GrammarError)(_words(error))


class GuidanceBackend:
    """GrammarBackend for the tokenizer.json of a prepared folder."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        """Read the tokenizer. Raises NoBackend if it cannot be used."""
        tokenizer = read_tokenizer(folder, vocab_size)
        self._tokenizer = tokenizer
        self._special_ids = _special_ids(folder / "tokenizer.json")
        self._limits = llguidance.LLParserLimits(
            max_lexer_states=LEXER_STATES, verbose_errors=False
        )

    def compile(self, wanted: StructuredOutputsParams, /) -> GuidanceGrammar:
        check_multiples(wanted)
        grammar = grammar_text(wanted, self._special_ids)
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if matcher.is_error():
            error = matcher.get_error()
            raise GrammarError(
                _words_of_schema(error, wanted) if wanted.kind in JSON_KINDS else _words(error)
            )
        size = 4 * -(-self._tokenizer.vocab_size // 32)
        return GuidanceGrammar(matcher, self._tokenizer.eos_tokens, size)

    def close(self) -> None:
        """See GrammarBackend."""


def read_tokenizer(folder: Path, vocab_size: int) -> llguidance.LLTokenizer:
    """Return the tokenizer of a prepared folder. Raises NoBackend if it cannot be used."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise NoBackend(f"{folder.name} has no tokenizer.json")
    try:
        tokenizer = llguidance.LLTokenizer(str(path))
        if tokenizer.vocab_size < vocab_size:
            tokenizer = llguidance.LLTokenizer(str(path), n_vocab=vocab_size)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise  # other errors are panics of the library
        raise NoBackend(f"tokenizer.json: {error}") from error
    return tokenizer


def _special_ids(path: Path) -> dict[str, int]:
    added = json.loads(path.read_text(encoding="utf-8")).get("added_tokens") or ()
    return {each["content"]: each["id"] for each in added if each.get("special")}


def _words_of_schema(error: str, wanted: StructuredOutputsParams) -> str:
    unknown = re.match(r"Unimplemented keys: \[(.*)\]", error)
    unmet = re.match(r"Unsatisfiable schema: required property '(.*)' is unsatisfiable", error)
    if unmet is not None:
        return (
            f"a schema that has a value for its required property {unmet[1]!r}: properties, "
            "patternProperties and allOf exclude each other there"
        )
    if unknown is None:
        return f"a schema that can be followed: {_words(error)}"
    keys = json.loads(f"[{unknown[1]}]")
    schema = json.loads(wanted.json or "{}")
    places = [f"{key} at {place}" for key in keys if (place := place_of(key, schema)) is not None]
    return f"a schema without {', '.join(places or keys)}, which no backend here follows"


def _words(error: str) -> str:
    line = " ".join(error.partition("\n<")[0].split())
    text = re.sub(r"^at \d+\(\d+\): invalid regex .*? \(in regex\): ", "", line)
    if text.startswith("NoExtension"):
        return "no text matches"
    text = text.partition(" 1 | start:")[0][:300]
    if _LIMIT.search(text):
        reached = _PLACE.sub("", text.partition("; consider")[0].partition("; try")[0])
        return f"a smaller one, for it reaches a limit: {reached}"
    return text or "no grammar"
