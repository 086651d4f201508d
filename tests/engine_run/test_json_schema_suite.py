"""The official test suite of JSON Schema (2020-12): what a grammar lets through is valid.

The suite lies under tests/reference/json_schema_suite with its licence (MIT; of commit 44401e0c). A
schema is followed or refused by name; one that is followed lets no instance through that the suite
calls invalid, and what is drawn under it at random is valid by another judge.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import referencing
from tests.engine_run.grammar_draws import VOCAB, Drawer, compiled

from tandem.engine.structured.backends.base import Grammar
from tandem.engine.structured.backends.guidance import GuidanceBackend
from tandem.engine.structured.errors import GrammarError
from tandem.text.tokenizer import Tokenizer

pytestmark = pytest.mark.full

SUITE = Path(__file__).parents[1] / "reference/json_schema_suite/tests/draft2020-12"
FOLLOWED = 257
"""Of 461 schemas; more is better, fewer is a loss."""
LET_THROUGH = 0.8
"""Share of the valid instances of followed schemas that are let through, at least."""
DRAWS = [4, pytest.param(12, marks=pytest.mark.nightly)]
"""Texts of each schema."""
WIDER = {"ECMA 262 \\S matches everything but whitespace"}
"""The backend's expressions and Python's do not take U+FEFF for white space."""
UNJUDGED = {
    "optional/bignum.json",
    "optional/ecmascript-regex.json",
    "optional/float-overflow.json",
    "optional/non-bmp-regex.json",
}
"""Numbers and expressions that Python's judge does not know."""


@dataclass(frozen=True)
class Case:
    """A schema of the suite, and what it says of instances."""

    file: str
    description: str
    schema: Any
    tests: list[dict[str, Any]]


CASES = [
    Case(path.relative_to(SUITE).as_posix(), case["description"], case["schema"], case["tests"])
    for path in sorted(SUITE.rglob("*.json"))
    for case in json.loads(path.read_text())
]


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Tokenizer:
    return Tokenizer.load(smollm2)


@pytest.fixture(scope="module")
def grammars(smollm2: Path) -> list[tuple[Case, Grammar | GrammarError]]:
    compiler, made = GuidanceBackend(smollm2, VOCAB), []
    for case in CASES:
        became: Grammar | GrammarError
        try:
            became = compiled(compiler, json=json.dumps(case.schema))
        except GrammarError as error:
            became = error
        made.append((case, became))
    return made


Grammars = list[tuple[Case, Grammar | GrammarError]]


def followed(grammars: Grammars) -> Iterator[tuple[Case, Grammar]]:
    for case, became in grammars:
        if not isinstance(became, GrammarError):
            yield case, became


def test_what_is_refused_is_named(grammars: Grammars):
    """By its keyword, or by why it cannot be followed; in a line."""
    refused = [(case, str(became)) for case, became in grammars if isinstance(became, GrammarError)]

    assert len(grammars) - len(refused) >= FOLLOWED
    for case, words in refused:
        assert words.startswith(("a schema without ", "a schema that ")), (case, words)
        assert "\n" not in words
        if words.startswith("a schema without "):
            names = words.removeprefix("a schema without ").partition(", which")[0]
            for name in names.split(", "):
                keyword = name.partition(" ")[0]
                assert f'"{keyword}"' in json.dumps(case.schema) or keyword.startswith("$dynamic")


def test_nothing_invalid_is_let_through(grammars: Grammars, tokenizer: Tokenizer):
    """No instance that the suite calls invalid; most of those that it calls valid."""
    valid = let = 0
    for case, grammar in followed(grammars):
        for test in case.tests:
            text = json.dumps(test["data"], ensure_ascii=False)
            taken = accepts(grammar.copy(), tokenizer.encode(text, add_special_tokens=False))
            if test["valid"]:
                valid, let = valid + 1, let + taken
            elif case.description not in WIDER:
                assert not taken, (case.file, case.description, test["description"], text)
    assert let >= LET_THROUGH * valid, f"{let} of {valid}: narrower than the schemas by too much"


def accepts(grammar: Grammar, token_ids: list[int]) -> bool:
    try:
        grammar.accept(token_ids)
    except GrammarError:
        return False
    return grammar.is_accepting


@pytest.mark.parametrize("draws", DRAWS)
def test_what_is_drawn_is_valid(grammars: Grammars, tokenizer: Tokenizer, draws: int):
    """Random texts under every schema that is followed, by jsonschema with its formats."""
    drawer, ended, drawn = Drawer(tokenizer), 0, 0
    for case, grammar in followed(grammars):
        if case.file in UNJUDGED or r"\\p{" in json.dumps(case.schema):
            continue
        judge = jsonschema.Draft202012Validator(
            case.schema,
            format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER,
            registry=referencing.Registry(),
        )
        for seed in range(draws):
            drawn += 1
            text = drawer.drawn(grammar.copy(), seed)
            if text is not None:
                ended += 1
                errors = list(judge.iter_errors(json.loads(text)))
                assert not errors, (case.file, case.description, text, errors)
    assert ended >= 0.7 * drawn, f"{ended} of {drawn} texts ended"
