"""What small templates take is found out, and chats are brought into that form."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tandem.text.chat_template import ChatOptions, ChatTemplates
from tandem.text.chat_turns import FORMS, OURS, IdForm, with_form

ALTERNATES = (
    "{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}"
    "{% endif %}"
    "{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "<{{ m.role }}>{{ m.content | trim }}{% endfor %}"
)
"""As Gemma 2's does."""
ONE_CALL = (
    "{% for m in messages %}{% if m.tool_calls %}"
    "{% if m.tool_calls | length != 1 %}{{ raise_exception('only single tool-calls') }}{% endif %}"
    "[{{ m.tool_calls[0].function.name }} {{ m.tool_calls[0].function.arguments | tojson }}]"
    "{% else %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
)
"""As Llama 3.1's does."""
ONLY_PARTS = (
    "{% for m in messages %}[{{ m.role }}]{% for p in m.content %}"
    "{% if p.type == 'text' %}{{ p.text }};{% endif %}{% endfor %}{% endfor %}"
)
WALKS = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}>{% endfor %}"
    "{% endfor %}"
)


def checks_ids(test: str) -> str:
    """A template that refuses ids for which ``test`` holds."""
    return (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
        "{% for c in m.tool_calls or [] %}"
        f"{{% if {test.replace('ID', 'c.id')} %}}{{{{ raise_exception('bad id') }}}}{{% endif %}}"
        "<{{ c.id }}>{% endfor %}"
        "{% if m.role == 'tool' %}"
        f"{{% if {test.replace('ID', 'm.tool_call_id')} %}}{{{{ raise_exception('bad id') }}}}"
        "{% endif %}<{{ m.tool_call_id }}>{% endif %}{% endfor %}"
    )


def render(source: str, chat: list[dict[str, Any]], **options: Any) -> str:
    return ChatTemplates({"default": source}, {}).render(chat, ChatOptions(**options))


def say(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def call(call_id: str | None, arguments: str = "{}") -> dict[str, Any]:
    made: dict[str, Any] = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    return made if call_id is None else {"id": call_id, **made}


@pytest.mark.parametrize(
    "test",
    [
        "ID | length != 9",
        "ID is not defined or ID | length != 9",
        "not ID.startswith('call_')",
        "ID | length > 30",
        "ID | length != 32",
        "ID | length > 8",
        "'_' in ID or ':' in ID or '-' in ID",
        "ID | int(-1) < 0 or ID | length != 9",
    ],
)
@pytest.mark.parametrize("given", ["call_" + 24 * "a", "toolu_01" + 22 * "B", "x", "c:1-é"])
def test_ids_get_the_form_that_a_template_checks(test: str, given: str) -> None:
    """Whatever it checks, a call and its result agree, and other calls have other ids."""
    chat = [say("user", "Hi")]
    for each in (given, given + "2"):
        chat += [
            {"role": "assistant", "tool_calls": [call(each)]},
            {"role": "tool", "tool_call_id": each, "content": "x"},
        ]

    written = [each.split(">")[0] for each in render(checks_ids(test), chat).split("<")[1:]]

    assert written[0] == written[1] != written[2] == written[3]


def test_ids_that_no_template_checks_stay() -> None:
    """The model sees what it wrote."""
    chat = [say("user", "Hi"), {"role": "assistant", "tool_calls": [call("x y")]}]

    assert "<x y>" in render(checks_ids("false"), chat)


def test_two_ids_never_become_one() -> None:
    """Not even in a form of ten ids, nor one that stands in the chat already."""
    form = IdForm("0123456789", 1)
    ids = ["3", *(f"call_{number}" for number in range(9))]
    chat = [{"role": "assistant", "tool_calls": [call(each) for each in ids]}]

    made = [each["id"] for each in with_form(chat, form)[0]["tool_calls"]]

    assert made[0] == "3"
    assert sorted(made) == list("0123456789")


def test_results_without_ids_go_to_calls_in_their_order() -> None:
    """Each takes the oldest call that has no result."""
    chat: list[dict[str, Any]] = [
        {"role": "assistant", "tool_calls": [call(None), call("b")]},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
    ]

    fitted = with_form(chat, OURS)

    calls = [each["id"] for each in fitted[0]["tool_calls"]]
    assert [each["tool_call_id"] for each in fitted[1:]] == calls
    assert len(set(calls)) == 2


@pytest.mark.parametrize("form", FORMS)
def test_what_a_form_makes_has_it(form: IdForm) -> None:
    """So that an id is mapped once."""
    assert form.has(form.make("call_é"))
    assert not form.has("call_é")
    assert form.make("a") != form.make("b")


def test_a_template_of_turns_takes_any_order() -> None:
    """Gemma's knows no system, and demands that users and assistants take turns."""
    chat = [
        *(say("system", "S"), say("user", "1"), say("user", "2"), say("assistant", "3")),
        *(say("assistant", "4"), say("system", "5"), say("user", "6"), say("user", "7")),
    ]

    assert render(ALTERNATES, chat) == "<user>S\n\n1\n\n2<assistant>3\n\n4<user>5\n\n6\n\n7"


def test_messages_are_joined_only_where_a_template_demands_it() -> None:
    """Another one shows them as they came."""
    source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    chat = [say("user", "1"), say("user", "2"), say("system", "3"), say("assistant", "4")]

    assert render(source, chat) == "<user>1<user>2<system>3<assistant>4"


def test_a_chat_that_only_a_system_begins_is_a_users() -> None:
    """There is no user's message to join it to."""
    assert render(ALTERNATES, [say("system", "S")]) == "<user>S"


def test_calls_of_one_message_are_split_where_one_is_all_that_is_taken() -> None:
    """Each before its own result, in the order of the calls."""
    calls = {"role": "assistant", "tool_calls": [call("a", '{"x":1}'), call("b", '{"x":2}')]}
    results = [
        {"role": "tool", "tool_call_id": "b", "content": "B"},
        {"role": "tool", "tool_call_id": "a", "content": "A"},
    ]

    prompt = render(ONE_CALL, [say("user", "Hi"), calls, *results])

    assert prompt == '[user]Hi[f {"x": 1}][tool]A[f {"x": 2}][tool]B'


def test_a_text_is_a_part_where_parts_alone_are_shown() -> None:
    """Such a template would walk over its letters and show none."""
    chat = [say("system", "a"), say("user", "b"), say("assistant", [{"type": "text", "text": "c"}])]

    assert render(ONLY_PARTS, chat) == "[system]a;[user]b;[assistant]c;"


@pytest.mark.parametrize("text", ['{"path": "src/m', "[1]", "null and void"])
def test_arguments_that_are_no_object_are_one_member_for_a_template_that_walks(text: str) -> None:
    """The model sees what it wrote, and that it was invalid."""
    chat = [
        say("user", "Hi"),
        {"role": "assistant", "content": "", "tool_calls": [call("a", text)]},
    ]

    assert render(WALKS, chat) == f"[user]Hi[assistant]<invalid_arguments={text}>"


def test_arguments_that_are_no_object_stay_as_they_are_in_a_text() -> None:
    """A template that adds arguments to its text gets what the model wrote, with no quotes."""
    source = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    source += "{{ '<' + c.function.arguments + '>' }}{% endfor %}{% endfor %}"
    broken = {"role": "assistant", "content": "", "tool_calls": [call("a", '{"x": "')]}
    whole = {"role": "assistant", "content": "", "tool_calls": [call("a", '{"x":1}')]}

    assert render(source, [broken, whole]) == '<{"x": "><{"x": 1}>'


def test_a_template_that_shows_nothing_of_a_chat_is_left_alone() -> None:
    """There is nothing to be found out."""
    chat = [say("system", "S"), say("user", "1"), say("user", "2")]

    assert render("{{ messages | length }}", chat) == "3"


def test_probes_leave_no_trace_in_a_prompt() -> None:
    chat = [say("user", "Hi"), {"role": "assistant", "tool_calls": [call("a")]}]

    assert "zq" not in render(checks_ids("ID | length != 9"), chat)
    assert "zq" not in json.dumps(chat)
