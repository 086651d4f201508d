"""Where a thought begins and ends: by the prompt, by a message that goes on, by a call in it."""

from __future__ import annotations

import pytest
from tests.text.test_parsers import Said, check_cuts, read

from tandem.protocol.structured import ReasoningSpan
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
