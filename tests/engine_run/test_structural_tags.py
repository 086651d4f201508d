"""Free text with parts that have a form, and forms that begin behind a thought."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.engine_run.grammar_draws import VOCAB, Drawer, compiled

from tandem.engine.structured.backends.guidance import GuidanceBackend
from tandem.engine.structured.errors import GrammarError
from tandem.engine.structured.tags import TagGrammar
from tandem.protocol.errors import InvalidParameter
from tandem.protocol.structured import MAX_TAG_ELEMENTS, ReasoningSpan
from tandem.text.tokenizer import Tokenizer

A = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOL = {
    "begin": "<tool>f(",
    "content": {"type": "json_schema", "json_schema": A},
    "end": ")</tool>",
}
OTHER = {"begin": "<tool>g(", "content": {"type": "regex", "pattern": "[a-c/]+"}, "end": ")</tool>"}
TRIGGERED = {"type": "triggered_tags", "triggers": ["<tool>"], "tags": [TOOL, OTHER]}
CONST = {"type": "const_string", "value": "Yes. "}
SPECIAL = {"begin": "<|im_start|>", "content": CONST, "end": "<|im_end|>"}
LARK = 'start: "(" start ")" | /[0-9]{2}/'


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Tokenizer:
    return Tokenizer.load(smollm2)


@pytest.fixture(scope="module")
def compiler(smollm2: Path) -> GuidanceBackend:
    return GuidanceBackend(smollm2, VOCAB)


@pytest.fixture
def takes(compiler: GuidanceBackend, tokenizer: Tokenizer) -> Any:
    """Whether a text is a whole answer under some ``structured_outputs``."""

    def takes(text: str, **fields: Any) -> bool:
        grammar = compiled(compiler, **fields)
        try:
            grammar.accept(tokenizer.encode(text, add_special_tokens=False))
        except GrammarError:
            return False
        return grammar.is_accepting

    return takes


def tag(form: Any) -> str:
    """A structural tag as a client writes it."""
    return json.dumps({"type": "structural_tag", "format": form})


@pytest.mark.parametrize(
    ("form", "whole", "wrong"),
    [
        (CONST, ["Yes. "], ["Yes.", "No"]),
        ({"type": "json_schema", "json_schema": A}, ['{"a": 1}'], ["{}", '{"a": "1"}']),
        ({"type": "json_schema", "json_schema": True}, ["[1]"], ["[1"]),
        ({"type": "regex", "pattern": "a/b+"}, ["a/bb"], ["a/"]),
        ({"type": "grammar", "grammar": LARK}, ["((42))"], ["((42)"]),
        ({"type": "any_text"}, ["what\never </tool>"], []),
        ({"type": "sequence", "elements": [CONST, TOOL | {"type": "tag"}]}, [], ["Yes. "]),
        (
            {"type": "sequence", "elements": [CONST, {"type": "json_schema", "json_schema": A}]},
            ['Yes. {"a": 2}'],
            ["Yes. ", '{"a": 2}'],
        ),
        ({"type": "or", "elements": [CONST, {"type": "regex", "pattern": "No"}]}, ["No"], ["Yes"]),
        (
            {"type": "tag", "begin": "<t>", "content": {"type": "any_text"}, "end": "</t>"},
            ["<t>a < b</t>"],
            ["<t>a", "<t>a</t>b"],
        ),
        (
            TRIGGERED,
            ["plain", 'Hm <tool>f({"a": 1})</tool> and <tool>g(a/b)</tool>.', ""],
            ['<tool>f({"b": 1})</tool>', "so <tool>h()</tool>", "<tool>g(d)</tool>", "<tool>"],
        ),
        (
            TRIGGERED | {"at_least_one": True},
            ["<tool>g(a)</tool> done"],
            ["plain", "Hm <tool>g(a)</tool>"],
        ),
        (
            TRIGGERED | {"stop_after_first": True},
            ["plain", "Hm <tool>g(a)</tool>"],
            ["Hm <tool>g(a)</tool> done"],
        ),
        (
            {"type": "tags_with_separator", "tags": [TOOL, OTHER], "separator": ", "},
            ["<tool>g(a)</tool>, <tool>g(b)</tool>", ""],
            ["<tool>g(a)</tool> <tool>g(b)</tool>", "plain"],
        ),
        (
            {"type": "tags_with_separator", "tags": [OTHER], "separator": ";"}
            | {"at_least_one": True, "stop_after_first": True},
            ["<tool>g(a)</tool>"],
            ["", "<tool>g(a)</tool>;<tool>g(a)</tool>"],
        ),
        (SPECIAL | {"type": "tag"}, ["<|im_start|>Yes. <|im_end|>"], ["Yes. "]),
        (
            {"type": "triggered_tags", "triggers": ["<|im_start|>"], "tags": [SPECIAL]},
            ["So: <|im_start|>Yes. <|im_end|> then"],
            ["<|im_start|>No"],
        ),
    ],
)
def test_a_form_lets_through_what_it_describes(
    takes: Any, form: Any, whole: list[str], wrong: list[str]
):
    """Each of the types, alone and in one another."""
    for text in whole:
        assert takes(text, structural_tag=tag(form)), text
    for text in wrong:
        assert not takes(text, structural_tag=tag(form)), text


def test_the_older_form(takes: Any):
    older = json.dumps(
        {
            "type": "structural_tag",
            "structures": [{"begin": "<f=a>", "schema": A, "end": "</f>"}],
            "triggers": ["<f="],
        }
    )
    assert takes('ok <f=a>{"a": 3}</f>', structural_tag=older)
    assert not takes('ok <f=a>{"a": "3"}</f>', structural_tag=older)
    assert not takes("<f=b>{}</f>", structural_tag=older)


def test_special_tokens_count_as_tokens_and_as_letters(
    compiler: GuidanceBackend, tokenizer: Tokenizer
):
    """A model that was taught a mark writes its token; another may spell it."""
    start = tokenizer.encode("<|im_start|>", add_special_tokens=False)
    assert len(start) == 1
    letters = [tokenizer.encode(each, add_special_tokens=False)[0] for each in "<|im_start|>"]
    for begin in (start, letters):
        grammar = compiled(compiler, structural_tag=tag(SPECIAL | {"type": "tag"}))
        grammar.accept([*begin, *tokenizer.encode("Yes. ", add_special_tokens=False)])


class Counted(dict[str, int]):
    """Special tokens that count how often all of them are looked through."""

    num_looks = 0

    def __iter__(self) -> Iterator[str]:
        self.num_looks += 1
        return super().__iter__()


def test_special_tokens_are_found_in_one_look_at_a_text():
    """The first, of those that begin there the longest; whatever the text holds of them."""
    special = Counted({"<s>": 1, "<s>x": 2, "</s>": 3, "": 4, "a|b": 5})
    tags = TagGrammar(special, of_schema=str, of_regex=str, of_lark=str)
    one = {"<s>": '(<[1]> | "<s>")', "<s>x": '(<[2]> | "<s>x")', "a|b": '(<[5]> | "a|b")'}

    written = tags.literal("<s><s>xx" * 5_000 + "a|bab")
    assert written.split(" ", 1)[0] == "(<[1]>"
    assert written == " ".join([one["<s>"], one["<s>x"], '"x"'] * 5_000 + [one["a|b"], '"ab"'])
    assert tags.literal("") == '""'
    assert tags.until("<s>xy") == '(TEXT <[2]> "y" | r1)'
    assert special.num_looks == 1


def test_triggers_are_elements_of_a_form(takes: Any):
    """Each tag is held against all of them."""
    triggers = [f"<t{each}>" for each in range(MAX_TAG_ELEMENTS)]
    tagged = {"begin": triggers[-1], "content": {"type": "any_text"}, "end": "</t>"}
    form = TRIGGERED | {"triggers": triggers, "tags": [tagged]}
    with pytest.raises(GrammarError, match="at most 1,024 formats"):
        takes("plain", structural_tag=tag(form))
    assert takes("plain", structural_tag=tag(form | {"triggers": triggers[-100:]}))


def test_blanks_are_those_of_the_request(takes: Any):
    form = tag({"type": "json_schema", "json_schema": A})
    assert takes('{ "a":1}', structural_tag=form)
    assert not takes('{ "a":1}', structural_tag=form, disable_any_whitespace=True)


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"type": "xml"}, "a type at /format of const_string, json_schema"),
        ({"type": "sequence", "elements": []}, "a list that is not empty for elements at /format"),
        (
            {"type": "sequence", "elements": [{"type": "any_text"}, CONST]},
            "any_text at /format/ele",
        ),
        ({"type": "tag", "begin": "<t>"}, "content at /format"),
        ({"type": "tag", "begin": 3, "content": CONST, "end": ""}, "a text for begin at /format"),
        (TRIGGERED | {"triggers": ["<x>"]}, "starts with one of triggers"),
        ({"type": "json_schema", "json_schema": 7}, "a JSON schema in the place of 7"),
        ({"type": "json_schema", "json_schema": {"not": {}}}, "not"),
        ({"type": "regex", "pattern": "("}, "unclosed group"),
        ({"type": "grammar", "grammar": "root ::= a"}, "Lark's syntax"),
        ({"type": "or", "elements": [CONST] * 2_000}, "at most 1,024 formats"),
        ("text", "an object at /format"),
    ],
)
def test_what_means_nothing_is_named(compiler: GuidanceBackend, form: Any, words: str):
    with pytest.raises(GrammarError) as caught:
        compiled(compiler, structural_tag=tag(form))
    assert words in str(caught.value), caught.value
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["[]", "{", "x" * 200_000, json.dumps({"a": "\ud800"})])
def test_bounds(compiler: GuidanceBackend, text: str):
    with pytest.raises((InvalidParameter, GrammarError)):
        compiled(compiler, structural_tag=text)


THINK = ReasoningSpan(opens=("<think>",), close="</think>")
OPEN = ReasoningSpan(close="</think>")


@pytest.mark.parametrize(
    ("fields", "right", "wrong"),
    [
        ({"json": json.dumps(A)}, '{"a": 1}', "{}"),
        ({"json_object": True}, '{"b": 1}', "[]"),
        ({"choice": ["yes", "no"]}, "no", "maybe"),
        ({"regex": "[0-9]{3}"}, "123", "12"),
        ({"grammar": LARK}, "(42)", "42)"),
        ({"structural_tag": tag(CONST)}, "Yes. ", "No. "),
    ],
)
def test_a_form_begins_behind_the_thought(takes: Any, fields: Any, right: str, wrong: str):
    """One that the prompt has opened must end; one that it has not may be there."""
    for before in ("", "<think>Is it {a}?\n</think>\n\n"):
        assert takes(before + right, **fields, reasoning=THINK)
        assert not takes(before + wrong, **fields, reasoning=THINK)
    assert takes("Is it {a}?\n</think>\n\n" + right, **fields, reasoning=OPEN)
    assert not takes(right, **fields, reasoning=OPEN)
    assert not takes("Is it {a}?\n</think>\n\n" + wrong, **fields, reasoning=OPEN)


def test_what_is_drawn_reads_as_it_was_meant(compiler: GuidanceBackend, tokenizer: Tokenizer):
    """Random texts: whatever stands behind a thought is valid."""
    drawer, ended = Drawer(tokenizer), 0
    for seed in range(20):
        grammar = compiled(compiler, json=json.dumps(A), reasoning=THINK)
        text = drawer.drawn(grammar, seed)
        if text is not None:
            ended += 1
            answer = text.partition("</think>")[2] if text.startswith("<think>") else text
            assert isinstance(json.loads(answer)["a"], int), text
    assert ended > 5
