"""A chat that is too long is refused before a template renders it."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.protocol.errors import InvalidParameter
from tandem.text.chat_template import ChatOptions
from tandem.text.folder import DEFAULT_TEMPLATE, TokenizerSettings
from tandem.text.tokenizer import MOST_COPIED, Tokenizer

TEMPLATE = "{{ seen() }}{{ messages[-1].content }}"


@pytest.fixture
def tokenizer(byte_level: Tokenizer) -> Tokenizer:
    """One that renders at most 100 characters."""
    settings = TokenizerSettings(chat_templates={DEFAULT_TEMPLATE: TEMPLATE})
    made = Tokenizer(byte_level._backend, settings)
    made.max_text_chars = 100
    return made


def chat(role: str, *contents: Any) -> list[Any]:
    return [{"role": role, "content": each} for each in contents]


def called(arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "arguments": arguments}}


LONG = [
    chat("user", "a" * 101),
    chat("user", "a" * 50, "b" * 51),
    chat("user", ["a" * 50, {"type": "text", "text": "b" * 51}]),
    chat("assistant", [{"type": "refusal", "refusal": "b" * 101}]),
    [{"role": "assistant", "content": "", "tool_calls": [called("a" * 101)]}],
    [{"role": "assistant", "content": "", "tool_calls": [called({"x": ["a" * 101]})]}],
    [{"role": "assistant", "content": "", "function_call": called("a" * 101)["function"]}],
    [{"role": "assistant", "content": "", "reasoning_content": "a" * 101}],
    [{"role": "assistant", "content": "", "reasoning": "a" * 101}],
    [{"role": "assistant", "content": None, "refusal": "a" * 101}],
]


@pytest.mark.parametrize("messages", LONG)
def test_a_long_chat_is_refused_before_it_is_rendered(tokenizer: Tokenizer, messages: Any) -> None:
    """The bound of a text was looked at behind the template, which may copy it again and again."""
    renders: list[str] = []

    def seen() -> str:
        renders.append("")
        return ""

    options = ChatOptions(template_kwargs={"seen": seen})
    with pytest.raises(InvalidParameter, match=r"^messages: .*at most 100 characters in all"):
        tokenizer.render_chat(messages, options)
    assert renders == []

    tokenizer.max_text_chars = None
    tokenizer.render_chat(messages, options)
    assert len(renders) == 1


def test_reasoning_under_both_of_its_names_counts_once(tokenizer: Tokenizer) -> None:
    options = ChatOptions(template_kwargs={"seen": lambda: "seen"})

    def rendered(size: int) -> str:
        thoughts = {"reasoning": "a" * 60, "reasoning_content": "a" * size}
        return tokenizer.render_chat([{"role": "assistant", "content": "", **thoughts}], options)

    assert rendered(60) == rendered(100) == "seen"
    with pytest.raises(InvalidParameter, match="they have 101"):
        rendered(101)


@pytest.mark.parametrize("role", ["system", "developer"])
def test_system_messages_are_bounded_by_what_it_takes_to_join_them(
    tokenizer: Tokenizer, role: str
) -> None:
    """Each to all before it, as DeepSeek's template does; other messages are not joined so."""
    options = ChatOptions(template_kwargs={"seen": lambda: ""})
    tokenizer.max_text_chars = 1_000
    many = ["a" * 4] * 249
    assert sum(range(250)) * 4 > MOST_COPIED * 1_000
    with pytest.raises(InvalidParameter, match="fewer or shorter system messages"):
        tokenizer.render_chat(chat(role, *many), options)
    tokenizer.render_chat(chat(role, *many[:150]), options)
    tokenizer.render_chat(chat("user", *many), options)


@pytest.mark.parametrize("messages", ["words", [5], [{"role": "user", "content": 5}], None])
def test_what_is_no_chat_is_refused_as_such(tokenizer: Tokenizer, messages: Any) -> None:
    with pytest.raises(InvalidParameter, match=r"^messages"):
        tokenizer.render_chat(messages)
