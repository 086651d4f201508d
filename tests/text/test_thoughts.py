"""Where a thought begins and ends: by the prompt, by a message that goes on, by a call in it."""

from __future__ import annotations

import pytest
from tests.text.test_parsers import Said, check_cuts, parser, read

from tandem.protocol.structured import ReasoningSpan
from tandem.text.parsers.cursor import MAX_HELD
from tandem.text.parsers.events import CallBegun, ContentDelta
from tandem.text.parsers.formats import REASONING_FORMATS
from tandem.text.parsers.model import ModelParsers


@pytest.mark.parametrize(
    ("prompt", "reasoning", "thought"),
    [
        ("...<think>\n", "qwen3", "a"),
        ("...", "qwen3", ""),
        ("<think>\n\n</think>\n\n", "qwen3", ""),
        ("...", "deepseek_r1", "a"),
        ("<think></think>", "deepseek_r1", ""),
    ],
)
def test_a_prompt_says_what_is_open(prompt: str, reasoning: str, thought: str) -> None:
    """An answer may begin within a thought, and then only its end is written."""
    said = read(["a</think>b"], None, reasoning, prompt)

    assert said.reasoning == thought
    assert said.content == ("b" if thought else "a</think>b")


@pytest.mark.parametrize("reasoning", ["qwen3", "deepseek_r1", "minimax_m2"])
@pytest.mark.parametrize(
    ("continued", "answer", "thought", "content"),
    [
        ("The capital of France is", " Paris.", "", " Paris."),
        ("<think>\nHm.\n</think>\n\nThe", " a</think>", "", " a</think>"),
        ("<think>\nLet me", " see.</think>\n\nParis.", " see.", "Paris."),
        ("<think>\n", "Let me see.</think>Paris.", "Let me see.", "Paris."),
        ("<think>a</think><think>\nb", "<think>c", "<think>c", ""),
    ],
)
def test_a_message_that_goes_on_says_what_is_open(
    reasoning: str, continued: str, answer: str, thought: str, content: str
) -> None:
    """Whatever the template wrote before it and the model begins answers with."""
    parsers = ModelParsers(reasoning=REASONING_FORMATS[reasoning])
    prompt = f"<|assistant|><think>\n\n</think>\n\n{continued}"
    for begin in (parsers.begin, parsers.begin_forced):
        stream, said = begin((), prompt, continued), Said()
        for letter in answer:
            said.take(stream.feed(letter))
        said.take(stream.end())
        assert (said.reasoning, said.content) == (thought, content)

    wanted = ReasoningSpan(close="</think>") if thought else None
    assert parsers.span(prompt, continued) == wanted
    assert parsers.span(prompt + "<think>\n", " ") == ReasoningSpan(close="</think>")


def test_a_call_in_a_thought_ends_it_and_a_mention_does_not() -> None:
    """Some models begin a call without closing their thought."""
    text = '<think>I use <tool_call> now\n<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    said = check_cuts(text, "hermes", "qwen3")

    assert said.reasoning == "I use <tool_call> now\n"
    assert said.meant == [("f", {})]


CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


@pytest.mark.parametrize(
    ("behind", "thought", "content", "calls"),
    [
        (" but better ask.</think>\n\nWhich one?", "but better ask.", "Which one?", 1),
        (" but <tool_call> is a word.</think>Yes", "but <tool_call> is a word.", "Yes", 1),
        ("\n\nDone, as </thinkers say.", "", "Done, as </thinkers say.", 1),
        ("\nand\n" + CALL + " so.</think> Yes", "so.", "and\nYes", 2),
        ("\n" + CALL, "", "", 2),
        ("</think>\nYes", "", "Yes", 1),
        ("x" * MAX_HELD + "</think>", "x" * MAX_HELD, "", 1),
        ("<tool_call> x" * 1_500 + "</think>", "", "<tool_call> x" * 1_500 + "</think>", 1),
        ("x" * MAX_HELD + "y</think>", "", "x" * MAX_HELD + "y</think>", 1),
    ],
)
def test_behind_a_call_a_thought_goes_on_if_its_end_comes(
    behind: str, thought: str, content: str, calls: int
) -> None:
    """Else the call has ended it, and what follows is told as content."""
    text = f"<think>I could write {CALL}{behind}"
    check = check_cuts if len(text) < 200 else lambda *given: read([given[0]], *given[1:])
    said = check(text, "hermes", "qwen3")

    assert said.reasoning == "I could write " + thought
    assert said.content == content
    assert said.meant == [("f", {})] * calls
    if len(text) >= 200:
        assert (
            read([text[at : at + 999] for at in range(0, len(text), 999)], "hermes", "qwen3")
            == said
        )


def test_what_waits_behind_a_call_in_a_thought_comes_before_the_next_call() -> None:
    stream = parser("hermes", "qwen3")
    stream.feed(f"<think>a {CALL}\nThen ")
    assert stream.feed("again ") == []
    told = stream.feed('<tool_call>{"name": "f", "argu')
    told += stream.feed('ments": {}}')
    assert [type(each) for each in told[:2]] == [ContentDelta, CallBegun]
    assert told[0] == ContentDelta("Then again ")
