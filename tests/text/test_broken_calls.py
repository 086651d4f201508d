"""Calls that are written wrong, or cut off: nothing of them is lost, or told as what it is not."""

from __future__ import annotations

from typing import Any

import pytest
from tests.text.test_parsers import check_cuts, read


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("\\usepackage{x} and more", "\\usepackage{x} and more"),
        ("C:\\users", "C:\\users"),
        ("\\u00", "\\u00"),
        ("\\u00e", "\\u00e"),
        ("\\u12\\n3", "\\u12\n3"),
        ("\\u\\u00e9", "\\ué"),
        ("\\u00e9", "é"),
    ],
)
def test_an_escape_that_is_none_is_a_backslash(written: str, meant: str) -> None:
    """Also one that begins as a letter's number: a call went on as content behind it."""
    call = f'<tool_call>{{"name": "f", "arguments": {{"s": "{written}"}}}}</tool_call>'
    said = check_cuts(call, "hermes")

    assert said.meant == [("f", {"s": meant})]
    assert said.content == ""


BEHIND = [
    ("mistral_json", '[TOOL_CALLS][{"name": "f", "arguments": {}}, and so on]', ", and so on]"),
    ("mistral_json", '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"x": 1}]', ', {"x": 1}]'),
    ("pythonic", "[f(), 1]", ", 1]"),
    ("llama3_json", '{"name": "f", "parameters": {}}; {"age": 3}', '; {"age": 3}'),
    ("qwen3_xml", "<function=f>\n</function>\n<function=>", "<function=>"),
    ("mistral_json", '[TOOL_CALLS][{"name": "f", "arguments": {}}]', ""),
    ("llama3_json", '{"name": "f", "parameters": {}}; {"na', '; {"na'),
    ("llama3_json", '{"name": "f", "parameters": {}};', ""),
    ("llama3_json", '{"name": "f", "parameters": {}}\n; \n', ""),
    ("llama3_json", '{"name": "f", "parameters": {}} ', ""),
    ("mistral_json", '[TOOL_CALLS][{"name": "f", "arguments": {}}, ', ""),
    ("pythonic", "[f(),", ""),
    ("qwen3_xml", "<tool_call>\n<function=f>\n</function>\n ", ""),
]


@pytest.mark.parametrize(("name", "text", "content"), BEHIND)
def test_what_is_no_call_behind_a_call_is_content(name: str, text: str, content: str) -> None:
    """Letter by letter: the first ones were lost. What would only separate it from a next one says
    nothing at the answer's end."""
    said = check_cuts(text, name)

    assert said.meant == [("f", {})]
    assert said.content == content


def test_a_separator_before_much_white_space_is_no_end() -> None:
    """However it is cut: the answer goes on behind it."""
    behind = "," + " " * 70 + "x"
    said = check_cuts(f'[TOOL_CALLS][{{"name": "f", "arguments": {{}}}}{behind}', "mistral_json")
    assert said.content == behind


def test_what_is_no_call_behind_a_call_in_a_thought_waits_for_its_end() -> None:
    call = '<think>Hm [TOOL_CALLS][{"name": "f", "arguments": {}}, so]'
    said = check_cuts(call, "mistral_json", "qwen3")
    closed = check_cuts(f"{call}</think>Yes", "mistral_json", "qwen3")

    assert (said.reasoning, said.content) == ("Hm ", ", so]")
    assert (closed.reasoning, closed.content) == ("Hm , so]", "Yes")
    assert said.meant == closed.meant == [("f", {})]


HARMONY: list[Any] = [
    ["<|channel|>", *"analysis"],
    ["<|start|>", *"assistant", "<|channel|>", *"final"],
    ["<|start|>", *"assistant to=functions.f", "<|channel|>", *"commentary json"],
    list(" to=functions.f"),
]


@pytest.mark.parametrize("header", HARMONY)
def test_a_header_that_the_answers_end_cuts_off_is_no_content(header: list[str]) -> None:
    """A mark is one token; what stands behind it was told."""
    said_before = "" if header[0] != "<|start|>" else "<|channel|>final<|message|>Hi<|end|>"
    first = len(" to=") if header[0] == " " else 1
    for size in range(first, len(header) + 1):
        said = read([said_before, *header[:size]], "openai", "openai_gptoss")
        assert said.content == ("Hi" if said_before else ""), header[:size]
        assert said.meant == []


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("<|channel|>final Hello, how are you?", "final Hello, how are you?"),
        ("<|channel|>Hello", "Hello"),
        ("<|start|>assistant final", "assistant final"),
        ("<|channel|>commentary to=functions.f js {", "commentary to=functions.f js {"),
        ("<|channel|>commentary to=functions.f <|constrain|>js", ""),
        (" to=functions.f<|channel|>commentary json", ""),
    ],
)
def test_what_is_no_header_is_content_at_the_answers_end(text: str, content: str) -> None:
    """An answer of gpt-oss's that lacks the mark behind its header was empty."""
    assert check_cuts(text, "openai", "openai_gptoss").content == content


def test_what_is_too_long_for_a_header_is_content() -> None:
    said = check_cuts("<|channel|>" + "a" * 600, "openai", "openai_gptoss", slice(1, None, 97))
    assert said.content == "a" * 600
