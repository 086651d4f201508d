"""Calls that a request forces: what workers are held to, and what the client gets of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
from tests.router.fake_worker import FakeWorker
from tests.router.http_server import Served

BODY: Any = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 300}
POINT = {
    "type": "object",
    "properties": {"at": {"$ref": "#/$defs/n"}, "more": {"items": {"$ref": "#"}}},
    "required": ["at"],
    "$defs": {"n": {"type": "integer"}},
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "go", "parameters": POINT, "strict": True}},
    {"type": "function", "function": {"name": "stay"}},
]
NAMED: Any = {"type": "function", "function": {"name": "go"}}
TWO = '[{"name":"go","parameters":{"at":1}},{"name":"stay","parameters":{}}]'


@pytest.fixture
def ask(serve: Callable[..., Served], decode: Callable[..., FakeWorker]) -> Callable[..., Any]:
    """Have the worker say something; the body's answer, and what the worker was held to."""
    worker = decode()
    app = serve(worker)

    def ask(text: str, **fields: Any) -> tuple[Any, Any]:
        worker.answer = app.tokenizer.encode(text, add_special_tokens=False)
        answer = app.post("/v1/chat/completions", json={**BODY, "tools": TOOLS, **fields})
        assert answer.status_code == 200, answer.text
        return answer, worker.submitted[-1].params.structured_outputs

    return ask


def schema_of(wanted: Any) -> Any:
    assert wanted.disable_any_whitespace
    return json.loads(wanted.json)


def test_any_of_the_tools_when_calls_are_required(ask: Callable[..., Any]) -> None:
    """Lists of calls are valid whose arguments are, references of a tool's schema included."""
    answer, wanted = ask(TWO, tool_choice="required")
    choice = answer.json()["choices"][0]
    calls = [each["function"] for each in choice["message"]["tool_calls"]]

    assert calls == [
        {"name": "go", "arguments": '{"at":1}'},
        {"name": "stay", "arguments": "{}"},
    ]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    schema = schema_of(wanted)
    deep: Any = {"at": 1, "more": [{"at": 2, "more": [{"at": 3}]}]}
    jsonschema.validate(json.loads(TWO), schema)
    jsonschema.validate([{"name": "go", "parameters": deep}], schema)
    deep["more"][0]["more"][0]["at"] = "x"
    wrong: list[Any] = [[], [{"name": "go", "parameters": deep}], [{"name": "run"}], {}]
    wrong.append([{"name": "stay", "parameters": {}}] * 17)
    for each in wrong:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(each, schema)


@pytest.mark.parametrize(
    "fields", [{"tool_choice": "required", "parallel_tool_calls": False}, {"tool_choice": NAMED}]
)
def test_one_call_where_one_is_wanted(ask: Callable[..., Any], fields: dict[str, Any]) -> None:
    """Of any tool, or of the one that is named; then the answer just stops."""
    answer, wanted = ask('[{"name":"go","parameters":{"at":1}}]', **fields)
    schema, named = schema_of(wanted), fields["tool_choice"] == NAMED

    assert answer.json()["choices"][0]["finish_reason"] == ("stop" if named else "tool_calls")
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(json.loads(TWO), schema)
    stay = [{"name": "stay", "parameters": {}}]
    assert jsonschema.Draft202012Validator(schema).is_valid(stay) is not named


def test_a_stream_tells_arguments_as_they_come(ask: Callable[..., Any]) -> None:
    """No content, and many deltas of one call."""
    long = '[{"name":"go","parameters":{"at":1,"why":"' + "because it is so, " * 4 + '"}}]'
    answer, _ = ask(long, tool_choice="required", stream=True)
    chunks = [
        json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")
    ]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    arguments = [
        call["function"]["arguments"] for each in deltas for call in each.get("tool_calls", ())
    ]

    assert not any(each.get("content") for each in deltas)
    assert json.loads("".join(arguments))["why"].startswith("because")
    assert len(arguments) > 5


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "run"}}}, "tool_choice"),
        ({"tool_choice": {"type": "custom", "function": {"name": "go"}}}, "tool_choice"),
        ({"tool_choice": {"function": "go"}}, "tool_choice"),
        ({"tool_choice": NAMED, "response_format": {"type": "json_object"}}, "tool_choice"),
        ({"tool_choice": "required", "tools": [{"type": "function"}]}, "tools[0].function"),
        (
            {
                "tool_choice": "required",
                "tools": [{"type": "function", "function": {"name": "f", "parameters": 5}}],
            },
            "tools[0].function.parameters",
        ),
        (
            {
                "tool_choice": "required",
                "tools": [
                    {"type": "function", "function": {"name": "f" * 200_000, "parameters": {}}}
                ],
            },
            "tools",
        ),
    ],
)
def test_wrong_choices_are_named(well: Served, fields: dict[str, Any], param: str) -> None:
    answer = well.post("/v1/chat/completions", json={**BODY, "tools": TOOLS, **fields})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
