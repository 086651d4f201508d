"""Grammars by outlines-core: what is allowed is what Python's engine, outlines-core over the whole
vocabulary and jsonschema allow, and what is not followed is refused by name."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import outlines_core
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine_run.grammar_draws import VOCAB, Drawer, compiled

from tandem.engine.structured.backends import AutoCompiler, make_compiler
from tandem.engine.structured.constraint import make_mask
from tandem.engine.structured.grammar import GrammarError, NoCompiler
from tandem.engine.structured.llguidance import LLGuidanceCompiler, read_tokenizer
from tandem.engine.structured.outlines import OutlinesCompiler
from tandem.engine.structured.outlines.strings import FORMATS
from tandem.engine.structured.outlines.tables import TableError, unpack
from tandem.text.tokenizer import Tokenizer

Compilers = tuple[OutlinesCompiler, Tokenizer]


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Tokenizer:
    """The model's."""
    return Tokenizer.load(smollm2)


@pytest.fixture(scope="module")
def compiler(smollm2: Path) -> Iterator[OutlinesCompiler]:
    """Over the model's tokenizer."""
    made = OutlinesCompiler(smollm2, VOCAB)
    yield made
    made.close()


@pytest.fixture(scope="module")
def vocabulary(smollm2: Path) -> outlines_core.Vocabulary:
    """The model's, as outlines-core has it."""
    tokenizer, tokens = read_tokenizer(smollm2, VOCAB), dict[bytes, list[int]]()
    for token in range(VOCAB):
        if not tokenizer.is_special_token(token):
            tokens.setdefault(tokenizer.decode_bytes([token]), []).append(token)
    return outlines_core.Vocabulary(VOCAB, tokens)


@pytest.mark.parametrize(
    "regex", ["(Paris|Lyon), [0-9]{2}!", "[a-zé日]{1,4}", r'"([^"\x00]){0,3}"', "(a|ab)(c|bcd)*"]
)
def test_masks_are_those_of_an_index_over_the_vocabulary(
    compiler: OutlinesCompiler, vocabulary: outlines_core.Vocabulary, regex: str
):
    """Every state on random ways, and where they end."""
    guide = outlines_core.Guide(outlines_core.Index(f"(?:{regex})\\z", vocabulary))
    rng = np.random.default_rng(0)
    for _ in range(6):
        grammar = compiled(compiler, regex=regex)
        guide.reset()
        for _ in range(12):
            words = np.frombuffer(make_mask(grammar, VOCAB, ()), np.uint8)
            allowed = np.flatnonzero(np.unpackbits(words, bitorder="little"))
            told = set(guide.get_tokens())
            assert grammar.is_accepting == (VOCAB in told)
            assert set(allowed.tolist()) == told - {VOCAB}
            if not len(allowed):
                assert grammar.is_terminated
                break
            token = int(rng.choice(allowed))
            grammar.accept([token])
            guide.advance(token, return_tokens=False)


SIGNS = 'ab 1\né"\\'
ATOMS = st.sampled_from(
    [
        *("a", "b", "1", " ", "é", ".", r"\d", r"\w", r"\s", r"\D", r"\W", r"\S", "[ab]"),
        *("[^a]", r"[^\d\s]", r"[\w-]", '"', r"\\", r"\n", "[a-b1]", r"[^\W1]", "()"),
    ]
)
REGEXES = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.lists(inner, min_size=1, max_size=3).map(lambda each: f"({'|'.join(each)})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{0,2}", "{1,}", "*?"])).map(
            lambda two: f"(?:{two[0]}){two[1]}"
        ),
    ),
    max_leaves=6,
)


def accepts(
    compiler: OutlinesCompiler, tokenizer: Tokenizer, text: str, **wanted: Any
) -> bool | None:
    """Whether a text is a whole answer; None where no text is one."""
    try:
        grammar = compiled(compiler, **wanted)
    except GrammarError as error:
        if re.search("some text matches|JSON writes nothing", str(error)) is None:
            raise
        return None
    try:
        grammar.accept(tokenizer.encode(text, add_special_tokens=False))
    except GrammarError:
        return False
    return grammar.is_accepting


@given(regex=REGEXES, texts=st.lists(st.text(SIGNS, max_size=5), min_size=1, max_size=8))
@settings(max_examples=300, deadline=None)
def test_whole_texts_are_those_of_pythons_engine(
    compiler: OutlinesCompiler, tokenizer: Tokenizer, regex: str, texts: list[str]
):
    """Or fewer, of signs beyond ASCII; never more."""
    for text in texts:
        taken = accepts(compiler, tokenizer, text, regex=regex)
        if taken is None:
            return
        matches = re.fullmatch(regex, text) is not None
        assert taken <= matches, (regex, text)
        if text.isascii():
            assert taken == matches, (regex, text)


@given(pattern=REGEXES, text=st.text(SIGNS, max_size=5), anchors=st.sampled_from(["", "^", "$"]))
@settings(max_examples=300, deadline=None)
def test_patterns_of_schemas_match_what_json_says(
    compiler: OutlinesCompiler, tokenizer: Tokenizer, pattern: str, text: str, anchors: str
):
    """A search in the text that stands between quotes, whatever JSON escapes of it."""
    pattern = {"": pattern, "^": f"^(?:{pattern})", "$": f"(?:{pattern})$"}[anchors]
    schema = json.dumps({"type": "string", "pattern": pattern})
    written = json.dumps(text, ensure_ascii=False)
    taken = accepts(compiler, tokenizer, written, json=schema)
    if taken is None:
        return
    # Python's $ is before a line end, too.
    matches = re.search(re.sub(r"\$$", r"\\Z", pattern), text) is not None
    assert taken <= matches, (pattern, written)
    if text.isascii() and written == f'"{text}"':
        assert taken == matches, (pattern, written)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_tokens_taken_back_leave_no_trace(compiler: OutlinesCompiler, data: st.DataObject):
    """A grammar that went on and back says what one says that never went; copies go alone."""
    regex = data.draw(st.sampled_from(["[a-z]{3,9}", "(yes|no|yes, sir)+", '"([^"]){0,9}"']))
    grammar, fresh = compiled(compiler, regex=regex), compiled(compiler, regex=regex)

    def step(*grammars: Any) -> bool:
        words = np.frombuffer(make_mask(grammars[0], VOCAB, ()), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(words, bitorder="little"))
        if len(allowed):
            token = int(allowed[data.draw(st.integers(0, len(allowed) - 1))])
            for each in grammars:
                each.accept([token])
        return bool(len(allowed))

    for _ in range(data.draw(st.integers(0, 3))):
        step(grammar, fresh)
    gone = sum(step(grammar) for _ in range(data.draw(st.integers(0, 4))))
    copy = grammar.copy()
    grammar.rollback(gone)
    assert make_mask(grammar, VOCAB, (0,)) == make_mask(fresh, VOCAB, (0,))
    assert (grammar.is_accepting, grammar.is_terminated) == (
        fresh.is_accepting,
        fresh.is_terminated,
    )
    copy.rollback(gone)
    assert make_mask(copy, VOCAB, (0,)) == make_mask(fresh, VOCAB, (0,))
    with pytest.raises(GrammarError, match="at most as many"):
        copy.rollback(100)


FOLLOWED: dict[str, Any] = {
    "names that JSON escapes": {
        "type": "object",
        "properties": {'a"b\\': {"const": {'k"(': [1, "x\n"]}}, "é.*": {"type": "null"}},
        "required": ['a"b\\'],
    },
    "required beside properties": {
        "properties": {"a": {"type": "boolean"}},
        "required": ["b"],
        "additionalProperties": {"type": "integer"},
    },
    "false": {"properties": {"a": False, "b": {"type": "null"}}, "additionalProperties": False},
    "types": {"type": ["integer", "null", "string"], "maxLength": 3},
    "references": {
        "type": "array",
        "items": {"$ref": "#/$defs/a~1b"},
        "minItems": 1,
        "maxItems": 3,
        "$defs": {"a/b": {"oneOf": [{"type": "string"}, {"const": 7}]}},
    },
    "tuple": {"type": "array", "prefixItems": [{"type": "null"}, {"enum": [1.5, "é"]}]},
    "tuple cut": {"prefixItems": [{"type": "null"}, {"type": "null"}], "maxItems": 1},
    "kinds of enum": {"type": "string", "enum": ["a", 1, None, 'q"']},
    "map": {"type": "object", "additionalProperties": {"type": "array", "items": True}},
    "tagged": {
        "oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
        "$defs": {
            name: {
                "type": "object",
                "properties": {"kind": {"const": name}, "of": {"type": "integer"}},
                "required": ["kind"],
            }
            for name in "ab"
        },
    },
} | {name: {"type": "string", "format": name} for name in FORMATS}


@pytest.mark.parametrize("name", FOLLOWED)
def test_what_is_drawn_is_valid(compiler: OutlinesCompiler, tokenizer: Tokenizer, name: str):
    """By jsonschema with its formats."""
    judge = jsonschema.Draft202012Validator(
        FOLLOWED[name], format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    drawer, ended = Drawer(tokenizer), 0
    for seed in range(20):
        text = drawer.drawn(compiled(compiler, json=json.dumps(FOLLOWED[name])), seed)
        if text is not None:
            ended += 1
            assert not list(judge.iter_errors(json.loads(text))), text
    assert ended >= 10


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"grammar": "start: /a/"}, "grammar is followed by guidance alone"),
        ({"structural_tag": "{}"}, "structural_tag is followed by guidance alone"),
        ({"json": {"properties": {"a": {"minimum": 3}}}}, "without minimum at /properties/a,"),
        ({"json": {"items": {"type": "array", "uniqueItems": True}}}, "uniqueItems at /items,"),
        ({"json": {"allOf": [{}, {"type": "null"}]}}, "allOf of several at /,"),
        ({"json": {"anyOf": [{}], "required": ["a"]}}, "required beside anyOf at /,"),
        ({"json": {"oneOf": [{"type": "string"}, {"maxLength": 3}]}}, "oneOf at / whose parts"),
        ({"json": {"type": "object", "minProperties": 1}}, "without minProperties at /,"),
        ({"json": {"patternProperties": {"a": {}}}}, "without patternProperties at /,"),
        ({"json": {"pattern": "a", "maxLength": 3}}, "maxLength beside pattern at /,"),
        ({"json": {"format": "regex"}}, "format 'regex' at /,"),
        ({"json": {"pattern": "a(?!b)"}}, "pattern at / is to be an expression without look-ar"),
        ({"json": {"prefixItems": [{}], "minItems": 2}}, "minItems beyond prefixItems at /,"),
        ({"json": {"items": {"$ref": "#"}}}, "$ref to what it is in at /items,"),
        ({"json": {"$ref": "http://a/b"}}, "refers to its own parts (#/...) at /$ref"),
        ({"json": {"enum": [0.1234567890123456789]}}, "enum of 0.12345678901234568 at /,"),
        ({"json": {"const": 10**30}}, "const of so large an integer at /,"),
        ({"json": {"minLength": 3, "maxLength": 2}}, "some value matches at /"),
        ({"json": False}, "some value matches at /"),
        ({"json": {"required": ["a"], "additionalProperties": False}}, "some value matches at"),
        ({"json": {"type": "objec"}}, "a type of object, array"),
        ({"json": True, "whitespace_pattern": "("}, "unclosed group"),
        ({"regex": r"a\b"}, "word boundaries"),
        ({"regex": "(?i)a"}, "the group (?i)"),
        ({"regex": "a++"}, "one that keeps all"),
        ({"regex": "[a&&b]"}, "& in a set"),
        ({"regex": "a^b"}, "^ elsewhere"),
        ({"regex": r"\p{Nothing}"}, "outlines-core"),
        ({"regex": "(" * 65 + ")" * 65}, "more than 64 groups"),
        ({"regex": "(a{999}){999}"}, "at most 20,000 parts"),
    ],
)
def test_what_is_not_followed_is_named(
    compiler: OutlinesCompiler, fields: dict[str, Any], words: str
):
    """Which would be passed over in silence by outlines-core, most of it."""
    if "json" in fields:
        fields = fields | {"json": json.dumps(fields["json"])}
    with pytest.raises(GrammarError, match=re.escape(words)) as caught:
        compiled(compiler, **fields)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) <= 400


@given(at=st.integers(0, 399), byte=st.integers(0, 255), size=st.integers(0, 400))
@settings(deadline=None)
def test_a_table_of_others_leads_nowhere_else(
    compiler: OutlinesCompiler, at: int, byte: int, size: int
):
    """Whatever is changed of its bytes, it is refused or stays within itself."""
    grammar = compiled(compiler, choice=["yes", "no"])
    packed = bytearray(grammar._automaton.tables.pack())  # type: ignore[attr-defined]
    packed[at % len(packed)] = byte
    for data in (bytes(packed), bytes(packed[:size])):
        try:
            tables = unpack(data)
        except TableError:
            continue
        assert 0 <= tables.after.min() <= tables.after.max() < len(tables.after)
        assert tables.columns.max() < tables.after.shape[1]


def test_auto_asks_outlines_for_what_guidance_refuses(smollm2: Path, tokenizer: Tokenizer):
    """Two kinds of object by a tag that are referred to; what both refuse is refused in guidance's
    words, and guidance's choice stands otherwise."""
    auto = AutoCompiler(LLGuidanceCompiler(smollm2, VOCAB), smollm2, VOCAB)
    try:
        assert type(compiled(auto, regex="a+")).__name__ == "LLGuidanceGrammar"
        assert auto._outlines is None
        schema = json.dumps(FOLLOWED["tagged"])
        with pytest.raises(GrammarError, match="oneOf"):
            compiled(LLGuidanceCompiler(smollm2, VOCAB), json=schema)
        grammar = compiled(auto, json=schema)
        grammar.accept(tokenizer.encode('{"kind": "b"}', add_special_tokens=False))
        assert grammar.is_accepting
        with pytest.raises(GrammarError, match="which no backend here follows"):
            compiled(auto, json='{"type": "array", "uniqueItems": true}')
        assert compiled(auto, grammar='start: "a"').is_accepting is False
    finally:
        auto.close()


def test_auto_is_guidance_where_outlines_is_not_installed(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch
):
    """What guidance refuses is refused in its words, and so it is behind the end."""
    monkeypatch.setitem(sys.modules, "outlines_core", None)
    auto = AutoCompiler(LLGuidanceCompiler(smollm2, VOCAB), smollm2, VOCAB)
    for _ in range(2):
        with pytest.raises(GrammarError, match="oneOf"):
            compiled(auto, json=json.dumps(FOLLOWED["tagged"]))
    assert auto._has_outlines is False
    with pytest.raises(NoCompiler, match=r"install tandem-serving\[outlines\]"):
        make_compiler("outlines", smollm2, VOCAB)
    auto.close()
