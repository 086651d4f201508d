"""Histories of agents: calls, their results, refusals and nulls, as clients keep and send them."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.protocol.errors import InvalidParameter
from tandem.text.chat_calls import check_tools
from tandem.text.chat_template import ChatTemplates

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
AGENT: list[dict[str, Any]] = [
    {"role": "developer", "content": "Use tools."},
    {"role": "user", "content": [{"type": "text", "text": "Weather?"}], "name": "ada"},
    {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "audio": None,
        "function_call": None,
        "annotations": [],
        "tool_calls": [CALL],
    },
    {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "rain"}]},
    {"role": "assistant", "content": "It rains.", "tool_calls": []},
]
PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m['content'] + '' }}{% endfor %}"
HERMES = (
    "{% for m in messages %}[{{ m.role }}{% if m.tool_call_id %} {{ m.tool_call_id }}{% endif %}"
    "{% if m.name %} {{ m.name }}{% endif %}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<{{ c.function.name }}"
    "{% for k, v in c.function.arguments.items() %} {{ k }}={{ v }}{% endfor %}>{% endfor %}"
    "{% endfor %}"
)
PARTS = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ p.type }}:{{ p.text }};{% endfor %}{% endif %}{% endfor %}"
)


def render(source: str, messages: list[dict[str, Any]]) -> str:
    return ChatTemplates({"default": source}, {}).render(messages)


def test_a_history_with_calls_is_rendered_by_any_template() -> None:
    """One that adds contents up sees a text everywhere; one that knows calls sees objects."""
    assert render(PLAIN, AGENT) == (
        "[system]Use tools.[user]Weather?[assistant][tool]rain[assistant]It rains."
    )
    assert render(HERMES, AGENT) == (
        "[system]Use tools.[user ada]Weather?[assistant]<f a=1>[tool c1]rain[assistant]It rains."
    )


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [('{"a": 1}', "<f a=1>"), ("", "<f>"), (None, "<f>"), ({"b": 2}, "<f b=2>"), ("{}", "<f>")],
)
def test_arguments_are_objects_to_a_template(arguments: object, shown: str) -> None:
    """As JSON in a text, as an object, or none at all."""
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}

    assert render(HERMES, [{"role": "assistant", "tool_calls": [call]}]) == f"[assistant]{shown}"


@pytest.mark.parametrize("arguments", ["{oops", "[1]", "5", "[" * 100_000])
def test_arguments_that_are_no_object_stay_what_the_model_wrote(arguments: str) -> None:
    """A model's slip does not break the history that holds it."""
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    source = "{{ messages[0].tool_calls[0].function.arguments }}"

    assert render(source, [{"role": "assistant", "tool_calls": [call]}]) == arguments


def test_the_older_form_of_a_call_is_a_call() -> None:
    """``function_call`` is not left out in silence, and ``function`` is a role."""
    history: list[dict[str, Any]] = [
        {"role": "assistant", "content": None, "function_call": CALL["function"]},
        {"role": "function", "name": "f", "content": "rain"},
    ]

    assert render(HERMES, history) == "[assistant]<f a=1>[function f]rain"


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": None, "refusal": "I will not."},
        {"role": "assistant", "content": "", "refusal": "I will not."},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "I will not."}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "I will not."}]},
    ],
)
def test_a_refusal_is_what_the_assistant_said(message: dict[str, Any]) -> None:
    """In either place where OpenAI's answers have it; a template of parts sees a part of text."""
    assert render(PLAIN, [message]) == "[assistant]I will not."
    assert render(PARTS, [message]).removeprefix("[assistant]") in {
        "I will not.",
        "text:I will not.;",
    }


def test_reasoning_has_two_names() -> None:
    """Templates read ``reasoning_content``; vLLM's newer answers say ``reasoning``."""
    source = "{{ messages[0].reasoning_content }}"

    assert render(source, [{"role": "assistant", "content": "x", "reasoning": "because"}]) == (
        "because"
    )


@pytest.mark.parametrize("source", [PLAIN, PARTS])
@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"role": "assistant", "tool_calls": 5}, r"tool_calls: 5"),
        ({"role": "assistant", "tool_calls": "f"}, r"tool_calls: 'f'"),
        ({"role": "assistant", "tool_calls": [5]}, r"tool_calls\[0\]: 5"),
        ({"role": "assistant", "tool_calls": [{"id": "x"}]}, r"tool_calls\[0\].function: None"),
        (
            {"role": "assistant", "tool_calls": [{"type": "custom", "custom": {}}]},
            r"tool_calls\[0\].type: 'custom'",
        ),
        (
            {"role": "assistant", "tool_calls": [CALL, {"function": {"name": 5}}]},
            r"tool_calls\[1\].function.name: 5",
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]},
            r"tool_calls\[0\].function.arguments: 5",
        ),
        ({"role": "assistant", "function_call": 5}, r"function_call: 5"),
        ({"role": "assistant", "content": 0}, r"content: 0"),
        ({"role": "assistant", "content": {}, "tool_calls": [CALL]}, r"content: {}"),
        ({"role": "assistant", "content": False}, r"content: False"),
        ({"role": "assistant", "content": "x", "audio": {"id": "a"}}, r"audio"),
        ({"role": "assistant", "content": "x", "refusal": 5}, r"refusal: 5"),
        ({"role": "user", "content": "x", "name": 5}, r"name: 5"),
        ({"role": "tool", "content": "x", "tool_call_id": 5}, r"tool_call_id: 5"),
        ({"role": "tool", "tool_call_id": "c"}, r"content: None"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, r"content\[0\]"),
        ({"role": "user", "content": [{"type": [], "text": "x"}]}, r"content\[0\]"),
        ({"role": "user", "content": [{"type": "text", "text": 5}]}, r"content\[0\]"),
        ({"role": ["user"], "content": "x"}, r"role: \['user'\]"),
    ],
)
def test_what_no_template_can_render_is_named(
    source: str, message: dict[str, Any], field: str
) -> None:
    """The message and the key, whatever form of content the template takes."""
    with pytest.raises(InvalidParameter, match=rf"^messages\[0\].{field}"):
        render(source, [message])


@pytest.mark.parametrize(
    ("tool", "field"),
    [
        ({"type": "web_search"}, "type"),
        ({"type": "function"}, "function"),
        ({"type": "function", "function": {}}, "function.name"),
        ({"function": {"name": ""}}, "function.name"),
    ],
)
def test_a_definition_that_is_none_is_named(tool: dict[str, Any], field: str) -> None:
    """Tools are for the template to show; a nameless one cannot be called."""
    with pytest.raises(InvalidParameter) as refused:
        check_tools([tool])

    assert refused.value.param == f"tools[0].{field}"
