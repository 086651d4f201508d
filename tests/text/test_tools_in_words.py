"""Templates that have no word for tools: these become text, and calls of that text are found."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tandem.protocol.errors import InvalidParameter
from tandem.text.chat_template import ChatOptions, ChatTemplates
from tandem.text.parsers.model import tool_format

PLAIN = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "X"}'},
}
ASKED: list[dict[str, Any]] = [
    {"role": "user", "content": "How is it?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
]


def rendered(messages: list[dict[str, Any]], **options: Any) -> str:
    return ChatTemplates({"default": PLAIN}, {}).render(messages, ChatOptions(**options))


def test_tools_stand_in_the_system_message():
    """One is made where there is none; the caller's own stays first."""
    text = rendered(ASKED[:1], tools=[TOOL])
    assert text.startswith("<system>You may call functions.")
    assert json.dumps(TOOL["function"]) in text
    own = [{"role": "system", "content": "Be brief."}, *ASKED[:1]]
    assert rendered(own, tools=[TOOL]).startswith("<system>Be brief.\n\nYou may call functions.")
    parts = [{"role": "system", "content": [{"type": "text", "text": "Be brief."}]}, *ASKED[:1]]
    assert "Be brief." in rendered(parts, tools=[TOOL])
    assert "You may call functions." in rendered(parts, tools=[TOOL])


def test_calls_and_results_of_a_history_are_text():
    """In the form in which the system message asks for them."""
    text = rendered(ASKED, tools=[TOOL])
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "X"}}\n</tool_call>'
    assert f"<assistant>{call}" in text
    assert text.endswith("<user><tool_response>\nsunny\n</tool_response><assistant>")


def test_calls_and_results_of_the_older_form_are_text():
    """``function_call`` and the role ``function``."""
    asked = {"name": "weather", "arguments": '{"city": "X"}'}
    older = [
        ASKED[0],
        {"role": "assistant", "content": None, "function_call": asked},
        {"role": "function", "name": "weather", "content": "sunny"},
    ]
    assert rendered(older, tools=[TOOL]) == rendered(ASKED, tools=[TOOL])


def test_what_is_written_is_what_is_looked_for():
    """The format of calls follows the template; one that knows tools is left alone."""
    assert tool_format("auto", PLAIN) == "hermes"
    assert tool_format("none", PLAIN) is None
    assert tool_format("auto", "") is None
    knowing = PLAIN + "{{ tools }}"
    assert tool_format("auto", knowing) is None
    templates = ChatTemplates({"default": knowing}, {})
    assert "You may call" not in templates.render(ASKED[:1], ChatOptions(tools=[TOOL]))
    assert "tools" in ChatTemplates({"default": PLAIN}, {}).names_of(ChatOptions())


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        (5, "messages"),
        ([], "messages"),
        ([5], r"messages\[0\]"),
        ([{"role": "tool", "tool_call_id": 5, "content": "x"}], r"messages\[0\]\.tool_call_id"),
        ([{"role": "tool", "content": {}}], r"messages\[0\]\.content"),
        ([{"role": "user", "content": [{"type": "image"}]}], r"messages\[0\]\.content\[0\]"),
    ],
)
def test_a_wrong_message_is_named_with_tools(messages, named):
    for tools in ([TOOL], None):
        with pytest.raises(InvalidParameter, match=f"^{named}:"):
            rendered(messages, tools=tools)


def test_a_wrong_call_of_a_history_is_named():
    wrong = [{"role": "assistant", "content": "", "tool_calls": [{"function": {}}]}]
    with pytest.raises(InvalidParameter, match=r"messages\[0\]\.tool_calls\[0\]"):
        rendered(wrong, tools=[TOOL])


def test_a_chat_without_tools_is_as_it_was():
    assert rendered(ASKED[:1]) == "<user>How is it?<assistant>"
