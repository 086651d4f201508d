"""Later turns of agents' loops, by the chat templates of models: refused by none, and whole."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tandem.text.chat_template import ChatOptions, ChatTemplates

FOLDER = Path(__file__).parent / "templates"
NAMES = sorted(each.stem for each in FOLDER.glob("*.jinja"))
MISTRALS = [
    "Mistral-Small-3.2-24B-Instruct-2506",
    "mistralai-Mistral-Nemo-Instruct-2407",
]
NO_HISTORY = {"ibm-granite-granite-3.3-2B-Instruct"}
"""Leaves calls out of a history."""
NO_TEXT_WITH_CALLS = {*MISTRALS}
"""Leave out what stands beside calls."""
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "read_file",
            "description": "Reads a file.",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
        },
    }
]
IDS = (
    "call_5f0c1d2e3a4b5c6d7e8f9a0b",
    "call_aB3dE5fG7hJ9kL1mN3pQ5rS7",
    "toolu_01A09q90qw90lq917835lq9",
    "chatcmpl-tool-0123456789abcdef0123456789abcdef",
    "functions.read_file:0",
    "abcdefgh1",
    "a",
    "fc_é😀",
)


@cache
def templates(name: str) -> ChatTemplates:
    source = (FOLDER / f"{name}.jinja").read_text()
    return ChatTemplates({"default": source}, {"bos_token": "<s>", "eos_token": "</s>"})


def render(name: str, chat: Sequence[dict[str, Any]]) -> str:
    return templates(name).render(chat, ChatOptions(tools=TOOLS))


def said(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def called(*calls: tuple[str, str], content: str | None = None) -> dict[str, Any]:
    """An assistant's message with calls: id and arguments of each."""
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [
            {
                "id": call_id,
                "type": "function",
                "function": {"name": "read_file", "arguments": text},
            }
            for call_id, text in calls
        ],
    }


def result(call_id: str, content: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def path(name: str) -> str:
    return json.dumps({"path": name})


def in_order(prompt: str, *texts: str) -> bool:
    """Whether a prompt has all texts, one behind the other."""
    at = 0
    for text in texts:
        at = prompt.find(text, at)
        if at < 0:
            return False
        at += len(text)
    return True


@pytest.mark.parametrize("call_id", IDS)
@pytest.mark.parametrize("name", NAMES)
def test_turns_two_and_three_take_ids_of_any_form(name: str, call_id: str) -> None:
    """Ids that a template checks get its form, the same for a call and its result, in each turn."""
    second = f"{call_id}2"
    turn_two = [
        said("system", "Be brief."),
        said("user", "Read a."),
        called((call_id, path("a"))),
        result(call_id, "text of a"),
    ]
    turn_three = [*turn_two, called((second, path("b"))), result(second, "text of b")]

    two, three = render(name, turn_two), render(name, turn_three)

    assert "text of a" in two
    assert in_order(three, "text of a", "text of b")
    if name in MISTRALS:
        found = [each for each in _nine_letters(three) if each in two]
        assert len(found) == 2, "the call's and its result's"
        assert found[0] == found[1]
        assert len(set(_nine_letters(three))) == 2
        assert (found[0] == call_id) == (call_id == "abcdefgh1")


def _nine_letters(prompt: str) -> list[str]:
    marks = ("[CALL_ID]", "[TOOL_RESULTS]", '"id": "', '"call_id": "')
    found = re.findall(f"(?:{'|'.join(map(re.escape, marks))})([A-Za-z0-9]{{9}})", prompt)
    return [str(each) for each in found]


@pytest.mark.parametrize("name", NAMES)
def test_calls_without_ids_are_paired_by_their_order(name: str) -> None:
    """The form before ``tool_calls`` has none, and some clients leave them out."""
    call = {"name": "read_file", "arguments": path("a")}
    chat = [
        said("user", "Read a."),
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "read_file", "content": "text of a"},
        {"role": "assistant", "content": None, "tool_calls": [{"function": call}]},
        {"role": "tool", "content": "text of b"},
    ]

    assert in_order(render(name, chat), "text of a", "text of b")


@pytest.mark.parametrize("name", NAMES)
def test_messages_in_parts_lose_no_text(name: str) -> None:

    def parts(*texts: str) -> list[dict[str, str]]:
        return [{"type": "text", "text": text} for text in texts]

    chat = [
        said("system", parts("sys-one", "sys-two")),
        said("user", parts("user-one", "user-two")),
        said("assistant", parts("answer-one", "answer-two")),
        said("user", parts("more-one", "more-two")),
        called((IDS[0], path("a"))),
        result(IDS[0], parts("result-one", "result-two")),
    ]

    prompt = render(name, chat)

    assert in_order(prompt, "sys-one", "sys-two")
    expected = ["user-one", "user-two", "answer-one", "answer-two", "more-one", "more-two"]
    assert in_order(prompt, *expected, "result-one", "result-two")
    assert "'type': 'text'" not in prompt
    assert '"type": "text"' not in prompt


@pytest.mark.parametrize(
    "arguments", ['{"path": "src/ma', "[1, 2]", "5", '"text"', "not JSON at all", '{"path": NaN']
)
@pytest.mark.parametrize("name", sorted(set(NAMES) - NO_HISTORY))
def test_arguments_that_are_no_object_stay_to_be_seen(name: str, arguments: str) -> None:
    """A call that max_tokens cut off is shown at every later turn, for the model to repair."""
    chat = [
        said("user", "Read a."),
        called((IDS[0], arguments)),
        result(IDS[0], "The arguments are no JSON object."),
        said("assistant", "Again."),
        said("user", "Go on."),
    ]

    prompt = render(name, chat)

    shown = {arguments, json.dumps(arguments)[1:-1]}
    assert any(each in prompt for each in shown), prompt
    assert in_order(prompt, "The arguments are no JSON object.", "Go on.")


@pytest.mark.parametrize("name", sorted(set(NAMES) - NO_HISTORY))
def test_calls_side_by_side_are_all_shown(name: str) -> None:
    """Also by templates that write one call alone: each stands before its result then."""
    chat = [
        said("user", "Read a and b."),
        called((IDS[0], path("file-a")), (IDS[1], path("file-b"))),
        result(IDS[0], "text of a"),
        result(IDS[1], "text of b"),
    ]

    prompt = render(name, chat)

    assert in_order(prompt, "file-a", "file-b")
    assert in_order(prompt, "text of a", "text of b")


CALL = [called((IDS[0], path("a"))), result(IDS[0], "result-x")]
ORDERS: dict[str, list[dict[str, Any]]] = {
    "two users": [said("user", "one"), said("user", "two")],
    "three users": [said("user", "one"), said("user", "two"), said("user", "three")],
    "users after an answer": [
        *(said("user", "one"), said("assistant", "two")),
        *(said("user", "three"), said("user", "four")),
    ],
    "two answers": [
        *(said("user", "one"), said("assistant", "two")),
        *(said("assistant", "three"), said("user", "four")),
    ],
    "an answer first": [said("assistant", "one"), said("user", "two")],
    "a user after a result": [said("user", "one"), *CALL, said("user", "two")],
    "a user after a call": [said("user", "one"), CALL[0], said("user", "two")],
    "users after results": [
        *(said("user", "one"), *CALL, said("user", "two"), said("user", "three")),
        *(*CALL, said("user", "four")),
    ],
    "an answer before a call": [said("user", "one"), said("assistant", "two"), *CALL],
    "two systems": [said("system", "one"), said("system", "two"), said("user", "three")],
    "a developer behind a system": [
        *(said("system", "one"), said("developer", "two"), said("user", "three")),
    ],
    "a system in the middle": [
        *(said("system", "one"), said("user", "two"), said("assistant", "three")),
        *(said("system", "four"), said("user", "five")),
    ],
    "a developer in the middle": [
        *(said("developer", "one"), said("user", "two"), said("assistant", "three")),
        *(said("developer", "four"), said("user", "five")),
    ],
    "a system at the end": [said("system", "one"), said("user", "two"), said("system", "three")],
    "a system after a result": [said("user", "one"), *CALL, said("system", "two")],
    "a system before a loop": [said("system", "four"), said("user", "one"), *CALL],
    "a result without a call": [said("user", "one"), result("call_lost", "two")],
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", NAMES)
def test_no_order_of_roles_is_refused_or_loses_text(name: str, order: str) -> None:
    """As agents send them. System messages may be shown in the template's own place for them."""
    chat = [
        {**each, "content": f"<{each['content']}>"} if each["content"] else each
        for each in ORDERS[order]
    ]

    prompt = render(name, chat)

    others = [each["content"] for each in chat if each["role"] not in ("system", "developer")]
    if name not in NO_TEXT_WITH_CALLS or order != "an answer before a call":
        assert in_order(prompt, *filter(None, others)), prompt
    for each in chat:
        if each["role"] in ("system", "developer"):
            assert prompt.count(each["content"]) == 1, prompt
