"""Every answer under a grammar of another process is valid, whichever library follows it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from tests.engine_run.grammar_draws import VOCAB, Drawer, compiled
from tests.engine_run.patience import time_for_grammars
from tokenizers.pre_tokenizers import ByteLevel

from tandem.engine.structured.backends.base import Grammar, GrammarBackend
from tandem.engine.structured.backends.followed import json_pattern
from tandem.engine.structured.constraint import make_mask
from tandem.engine.structured.errors import GrammarError, NoBackend
from tandem.engine.structured.process import PREPARED, GrammarProcess, ProcessBackend
from tandem.llm import LLM, SamplingParams, StructuredOutputsParams
from tandem.protocol.errors import InvalidParameter, RequestRefused
from tandem.text.tokenizer import Tokenizer

pytestmark = pytest.mark.full

PERSON: dict[str, Any] = {
    "title": "Person",
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12, "description": "first and last"},
        "age": {"type": "integer"},
        "code": {"type": "string", "pattern": "^[A-Z]{2}-\\d{3}$"},
        "kind": {"type": "string", "enum": ["new", "old"]},
        "at": {"$ref": "#/$defs/place"},
    },
    "required": ["name", "age", "at"],
    "additionalProperties": False,
    "$defs": {
        "place": {"anyOf": [{"type": "null"}, {"type": "array", "items": {"type": "number"}}]}
    },
}
SCHEMAS: dict[str, Any] = {
    "person": PERSON,
    "texts": {"type": "array", "items": {"type": "string", "minLength": 1}, "maxItems": 3},
    "map": {"additionalProperties": {"type": "boolean"}},
    "pattern of any text": {"type": "string", "pattern": "^.{2,4}[^a-z]$"},
}
CHAT = [{"role": "user", "content": "Which city is the capital of France?"}]
BYTES = sorted(ByteLevel.alphabet())


@pytest.fixture(scope="module")
def process(smollm2: Path) -> Iterator[GrammarProcess]:
    with time_for_grammars():
        made = GrammarProcess(smollm2, VOCAB)
        yield made
        made.close()


@pytest.fixture(scope="module", params=PREPARED)
def backend(request: pytest.FixtureRequest, process: GrammarProcess) -> GrammarBackend:
    return ProcessBackend(request.param, process)


@pytest.fixture(scope="module")
def drawer(smollm2: Path) -> Drawer:
    return Drawer(Tokenizer.load(smollm2))


@pytest.mark.parametrize("name", SCHEMAS)
def test_json_that_is_drawn_is_valid(backend: GrammarBackend, drawer: Drawer, name: str) -> None:
    """Texts at random, judged by jsonschema."""
    grammar, ended = compiled(backend, json=json.dumps(SCHEMAS[name])), 0
    for seed in range(4):
        text = drawer.drawn(grammar.copy(), seed)
        if text is not None:
            ended += 1
            jsonschema.validate(json.loads(text), SCHEMAS[name])
    assert ended > 1


def tokens_of(grammar: Grammar, size: int = VOCAB) -> list[int]:
    """Return the tokens that may be next."""
    bits = np.unpackbits(np.frombuffer(make_mask(grammar, size, ()), np.uint8), bitorder="little")
    return [int(each) for each in np.flatnonzero(bits)]


def test_choices_are_followed_token_by_token(backend: GrammarBackend, drawer: Drawer) -> None:
    """A copy keeps its place; an answer ends where a choice does, or goes on."""
    tokenizer = drawer.tokenizer
    grammar = compiled(backend, choice=["yes", "no", "yes, sir", 'a.c "é"'])
    texts = {tokenizer.decode([each]) for each in tokens_of(grammar)}
    assert texts == {"y", "ye", "yes", "n", "no", "a"}
    other = grammar.copy()
    grammar.accept(tokenizer.encode("yes", add_special_tokens=False))
    assert grammar.is_accepting
    assert tokens_of(grammar)
    grammar.accept(tokenizer.encode(", sir", add_special_tokens=False))
    assert tokens_of(grammar) == []
    assert (grammar.is_accepting, grammar.is_terminated) == (True, True)
    assert {tokenizer.decode([each]) for each in tokens_of(other)} == texts
    (wrong,) = tokenizer.encode("x", add_special_tokens=False)
    with pytest.raises(GrammarError, match="not allowed"):
        other.accept([wrong])
    fresh = compiled(backend, choice=["yes"])
    fresh.accept([wrong])
    with pytest.raises(GrammarError):
        tokens_of(fresh)


@pytest.mark.parametrize("regex", [r"^(yes|no|[0-9]{1,6})$", r"[A-Z][a-z]{2,8}, \d{3}-\d{4}"])
def test_texts_that_are_drawn_match(backend: GrammarBackend, drawer: Drawer, regex: str) -> None:
    grammar = compiled(backend, regex=regex)
    for seed in range(4):
        text = drawer.drawn(grammar.copy(), seed)
        assert text is not None
        assert re.fullmatch(regex, text), text


def test_a_grammar_that_nests_is_followed_by_xgrammar(
    process: GrammarProcess, drawer: Drawer
) -> None:
    backend = ProcessBackend("xgrammar", process)
    for text in ('start: "(" start ")" | /[0-9]{2}/', 'root ::= "(" root ")" | [0-9] [0-9]'):
        grammar = compiled(backend, grammar=text)
        for seed in range(4):
            drawn = drawer.drawn(grammar.copy(), seed)
            assert drawn is None or re.fullmatch(r"\(*[0-9]{2}\)*", drawn)
        grammar.accept(drawer.tokenizer.encode("((42))", add_special_tokens=False))
        assert grammar.is_accepting


def test_a_vocabulary_of_bytes_is_followed(tmp_path: Path) -> None:
    """By every library; a token that is a part of a character, by those that read bytes."""
    vocab = {sign: at for at, sign in enumerate(BYTES)}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer_of(vocab)))
    with time_for_grammars():
        process = GrammarProcess(tmp_path, len(BYTES))
        for name in PREPARED:
            grammar = compiled(ProcessBackend(name, process), regex="[ab]{2}(c|é)")
            assert [BYTES[each] for each in tokens_of(grammar, 256)] == ["a", "b"]
            grammar.accept([vocab["a"], vocab["b"]])
            found = {BYTES[each] for each in tokens_of(grammar, 256)}
            assert found == ({"c"} if name == "lm-format-enforcer" else {"c", "Ã"})
        process.close()


def tokenizer_of(vocab: dict[str, int]) -> dict[str, Any]:
    flags = {"add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "ByteLevel", **flags},
        "decoder": {"type": "ByteLevel", **flags},
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }


def test_a_folder_without_a_tokenizer_has_no_backend(tmp_path: Path) -> None:
    process = GrammarProcess(tmp_path, VOCAB)
    with pytest.raises(NoBackend, match=r"has no tokenizer\.json"), time_for_grammars():
        ProcessBackend("outlines", process)
    process.close()


@pytest.mark.parametrize(
    ("name", "fields", "words"),
    [
        ("outlines", {"grammar": "start: /a/"}, "grammar requires another backend"),
        ("outlines", {"structural_tag": "{}"}, "structural_tag requires another backend"),
        ("xgrammar", {"structural_tag": "{}"}, "structural_tag requires another backend"),
        ("outlines", {"json_object": True}, "json_object requires another backend"),
        ("lm-format-enforcer", {"grammar": "start: /a/"}, "grammar requires another backend"),
        ("lm-format-enforcer", {"json": {}, "whitespace_pattern": " "}, "without whitespace_pat"),
        ("xgrammar", {"json": {}, "whitespace_pattern": " "}, "without whitespace_pattern"),
        ("outlines", {"json": {"type": "integer", "minimum": 3}}, "without minimum at /:"),
        ("lm-format-enforcer", {"json": {"items": {"minimum": 3}}}, "without minimum at /items:"),
        ("xgrammar", {"json": {"type": "array", "uniqueItems": True}}, "without uniqueItems at /:"),
        ("outlines", {"json": {"properties": {"a": {}}}}, "values of any type at /properties/a:"),
        ("outlines", {"json": {"type": "object"}}, "properties or items of any kind at /:"),
        *(
            (name, {"json": schema}, f"without {words} at /:")
            for name in PREPARED
            for schema, words in [
                ({"oneOf": [{"type": "null"}]}, "values of any type"),
                ({"type": "string", "oneOf": []}, "oneOf"),
                ({"anyOf": [{"type": "null"}], "required": ["a"]}, "required"),
                ({"type": "object", "required": ["a"]}, "required"),
                ({"properties": {'a"b': {"type": "null"}}}, "properties"),
                ({"items": True}, "items"),
                ({"minLength": 2.0}, "minLength"),
                ({"type": "string", "format": "date"}, "format"),
                ({"type": "string", "pattern": '"'}, "pattern"),
                ({"type": "string", "pattern": "a", "maxLength": 3}, "maxLength and pattern"),
                ({"type": "integer", "enum": ["a"]}, "enum"),
                ({"$ref": "#/$defs/none"}, r"$ref"),
                ({"type": ["string", "null"], "maxLength": 3}, "several types"),
            ]
        ),
    ],
)
def test_what_a_library_would_ignore_is_named(name: str, fields: Any, words: str) -> None:
    if "json" in fields:
        fields = fields | {"json": json.dumps(fields["json"])}
    wanted = StructuredOutputsParams(**fields)
    with pytest.raises(GrammarError, match=re.escape(words)):
        PREPARED[name](wanted)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (r"^\d{2}\.[a-z_]+$", r"[0-9]{2}\.[a-z_]+"),
        (r"[\w-]", "[A-Za-z0-9_-]"),
        ("(a|b)?", "(a|b)?"),
        (".", r'[^"\\\x00-\x1f]'),
        ("[^a-z]", r'[^a-z"\\\x00-\x1f]'),
        (r"a\\", None),
        (r"\s", None),
        (r"[ -~]", None),
        (r"[\W]", None),
        (r"\x22", None),
        ('a"b', None),
        ("a\nb", None),
    ],
)
def test_a_pattern_never_leaves_its_string(pattern: str, expected: str | None) -> None:
    """Sets lose what JSON escapes; other patterns that may match it are refused."""
    assert json_pattern(pattern) == expected


def test_a_backend_is_one_that_exists() -> None:
    """Another is refused by its name."""
    with pytest.raises(InvalidParameter, match="guidance, outlines, xgrammar, lm-format-enforcer"):
        StructuredOutputsParams(regex="a", backend="jsonformer").verify()


@pytest.mark.slow
def test_requests_choose_their_backends(small: Path) -> None:
    """Answers in one batch match, while blocks run out and rows are preempted; an error of one
    backend is its request's."""
    schema = json.dumps(
        {"properties": {"city": {"type": "string", "maxLength": 8}}, "required": ["city"]}
    )
    forms: list[dict[str, Any]] = [{"regex": r"([A-Z][a-z]{3} ){6}\d{3}"}, {"json": schema}]
    wanted = [
        StructuredOutputsParams(backend=name, **form)
        for name in ("guidance", *PREPARED)
        for form in forms
    ]
    params = [
        SamplingParams(temperature=1.0, seed=at, max_tokens=60, structured_outputs=each)
        for at, each in enumerate(wanted)
    ]
    settings: dict[str, Any] = {"max_model_len": 256, "num_gpu_blocks_override": 24}
    with time_for_grammars(), LLM(str(small), device="cpu", **settings) as llm:
        outputs = llm.chat([CHAT] * len(params), params, use_tqdm=False)
        bad = StructuredOutputsParams(backend="outlines", regex="(a")
        with pytest.raises(RequestRefused, match=r"structured_outputs\.regex"):
            llm.chat(CHAT, SamplingParams(structured_outputs=bad), use_tqdm=False)

    for form, output in zip(wanted, outputs, strict=True):
        answer = output.outputs[0]
        if answer.finish_reason == "length":
            assert form.json is not None  # white space may go on up to there
            continue
        if form.regex is not None:
            assert re.fullmatch(form.regex, answer.text)
        else:
            assert jsonschema.validate(json.loads(answer.text), json.loads(schema)) is None
