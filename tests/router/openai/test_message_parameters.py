"""Each parameter of a message is done, is information, or refused by name, as its page has it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tests.router.http_server import Served
from tests.router.openai.parameters_page import listed
from tests.router.openai.test_parameters import odd_value

from tandem.router.api.anthropic import body as parameters
from tandem.router.api.anthropic.body import CountBody, MessagesBody

PAGE = Path(__file__).parents[3] / "docs" / "messages.md"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
COUNT: dict[str, Any] = {"messages": BODY["messages"]}
TOOL: dict[str, Any] = {"name": "f", "input_schema": {"type": "object"}}
CALL: dict[str, Any] = {"type": "tool_use", "id": "t", "name": "f", "input": {}}


def done(of: str) -> set[str]:
    section = PAGE.read_text().split("## Parameters\n")[1].split("\n## ")[0]
    found = re.findall(r"^\| `([\w.\[\]]+)` \| (\w+) \|", section, re.MULTILINE)
    return {name for name, which in found if which in ("both", of)}


@pytest.mark.parametrize("of", ["messages", "count"])
def test_the_page_the_schema_and_the_package_know_the_same(of: str) -> None:
    """No name of the package's is left to chance, and the page tells nothing else."""
    from anthropic.types import message_count_tokens_params, message_create_params

    body = MessagesBody if of == "messages" else CountBody
    package: Any = (
        message_create_params.MessageCreateParamsBase
        if of == "messages"
        else message_count_tokens_params.MessageCountTokensParams
    )
    refused = {
        *body.REFUSED,
        *(f"tools[].{name}" for name in parameters.TOOL),
    }
    api = {"messages": "messages", "count": "count_tokens"}[of]
    known = done(of) | listed("Hints", api)

    assert done(of) == set(body.model_fields) - set(body.HINTS)
    assert set(body.HINTS) <= listed("Hints", api)
    assert listed("Refused", api) == refused
    assert set(package.__annotations__) <= known | refused


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": None}, "max_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "adaptive", "budget_tokens": 1}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "between_tools"}}, "thinking.type"),
    ({"thinking": {"type": "adaptive", "display": 5}}, "thinking.display"),
    ({"output_config": {"effort": "lowest"}}, "output_config.effort"),
    ({"output_config": {"format": {"type": "text"}}}, "output_config.format.type"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    ({"tools": [{**TOOL, "defer_loading": 1}]}, "tools[0].defer_loading"),
    ({"tools": [{**TOOL, "desciption": "d"}]}, "tools[0].desciption"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tools": [TOOL], "tool_choice": {"type": "any", "name": "f"}}, "tool_choice.name"),
    ({"tools": [TOOL], "tool_choice": {"type": "required"}}, "tool_choice.type"),
    (
        {
            "tools": [TOOL],
            "tool_choice": {"type": "any"},
            "output_config": {"format": {"type": "json_schema", "schema": {}}},
        },
        "tool_choice",
    ),
    ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
    ({"stop_sequences": ["x"] * 1_025}, "stop_sequences"),
    ({"temperature": 3.0}, "temperature"),
    ({"metadata": {"user_id": "x" * 513}}, "metadata.user_id"),
    ({"metadata": {"user": "x"}}, "metadata.user"),
    ({"system": [{"type": "image"}]}, "system[0].type"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [5]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": "x", "nam": "y"}]}, "messages[0].nam"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        "messages[0].content[0].type",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "txt": "x"}]}]},
        "messages[0].content[0].txt",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages[0].content[0].text",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t"}]}]},
        "messages[0].content[0].tool_use_id",
    ),
    (
        {"messages": [{"role": "assistant", "content": [{**CALL, "input": "{}"}]}]},
        "messages[0].content[0].input",
    ),
    ({"messages": [{"role": "assistant", "content": [CALL]}]}, "messages[0]"),
    ({"service_tier": 1}, "service_tier"),
    ({"temprature": 1}, "temprature"),
]


@pytest.mark.parametrize(("extra", "param"), REFUSED)
def test_refusals_name_the_field(well: Served, extra: dict[str, Any], param: str) -> None:
    """As the client wrote it, with the value and what is allowed."""
    answer = well.post("/v1/messages", json={**BODY, **extra})
    error = answer.json()["error"]

    assert (answer.status_code, error["type"]) == (400, "invalid_request_error"), answer.text
    assert error["message"].startswith(f"{param}: "), error["message"]


@pytest.mark.parametrize(
    ("result", "place"),
    [
        ({"content": [{"type": "image"}]}, "content[0]"),
        ({"content": 5}, "content"),
        ({"is_error": "no"}, "is_error"),
    ],
)
def test_results_are_checked(well: Served, result: dict[str, Any], place: str) -> None:
    block = {"type": "tool_result", "tool_use_id": "t", **result}
    history = [{"role": "assistant", "content": [CALL]}, {"role": "user", "content": [block]}]
    answer = well.post("/v1/messages", json={**BODY, "messages": history})

    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(f"messages[1].content[0].{place}: ")


@pytest.mark.parametrize(
    ("path", "body", "known"),
    [
        ("/v1/messages", BODY, parameters.MESSAGES),
        ("/v1/messages/count_tokens", COUNT, parameters.COUNT),
    ],
)
def test_values_that_ask_for_nothing_pass(
    well: Served, path: str, body: dict[str, Any], known: Any
) -> None:
    """null and each neutral value of what is refused; anything else is refused with the reason."""
    for name, refused in known.items():
        for value in (None, *refused.neutral):
            answer = well.post(path, json={**body, name: value})
            assert answer.status_code == 200, answer.text
        answer = well.post(path, json={**body, name: odd_value(refused)})
        assert answer.status_code == 400
        message = answer.json()["error"]["message"]
        assert message.startswith(f"{name}: ")
        assert refused.why in message


def test_information_passes(well: Served) -> None:
    """It changes no answer; what the package never sends is refused."""
    cached = {"cache_control": {"type": "ephemeral"}}
    for extra in (cached, {"metadata": {"user_id": "me"}}):
        assert well.post("/v1/messages", json={**BODY, **extra}).status_code == 200
    count = {**COUNT, **cached}
    assert well.post("/v1/messages/count_tokens", json=count).json()["input_tokens"] > 0
