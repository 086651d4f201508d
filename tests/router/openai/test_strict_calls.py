"""Strict tools, and forms that begin behind a thought: what workers are asked to keep to."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from tests.router.fake_worker import FakeWorker
from tests.router.http_server import Served
from tests.router.openai.test_tool_calls import CHAT, write_model

from tandem.protocol.card import WorkerRole
from tandem.protocol.structured import MAX_SCHEMA_BYTES, ReasoningSpan, StructuredOutputsParams
from tandem.router.api.openai.answers import answer_reader
from tandem.router.api.openai.answers import answer_reader as strict_calls
from tandem.router.api.openai.answers.answer_reader import check_strict
from tandem.router.api.openai.bodies.schemas import ChatBody
from tandem.router.api.openai.strict_parameters import parameters_form
from tandem.text.parsers.formats import TOOL_FORMATS

SCHEMA: Any = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
STRICT: Any = {"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}}
LOOSE: Any = {"type": "function", "function": {"name": "g", "parameters": SCHEMA}}
CLOSED: Any = {"chat_template_kwargs": {"enable_thinking": False}}
THINK = ReasoningSpan(opens=("<think>",), close="</think>")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A model that writes hermes and thinks."""
    folder = tmp_path_factory.mktemp("strict-model")
    write_model(folder)
    worker = FakeWorker(WorkerRole.DECODE)
    app = Served(str(folder), [worker])
    yield app
    app.stop()
    worker.stop()


def wanted(served: Served, **fields: Any) -> StructuredOutputsParams | None:
    body = {"model": "fake", "messages": CHAT, **fields}
    answer = served.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return served.workers[0].submitted[-1].params.structured_outputs


def test_strict_tools_are_held_to_from_the_mark_of_a_call_on(served: Served) -> None:
    """In the model's own format; one that is not strict may be called with any object."""
    held = wanted(served, tools=[STRICT, LOOSE], **CLOSED)
    assert held is not None
    assert held.reasoning is None
    form = json.loads(held.structural_tag or "")["format"]

    assert form["type"] == "triggered_tags"
    assert form["triggers"] == ["<tool_call>"]
    assert form["stop_after_first"] is False
    begins = [tag["begin"] for tag in form["tags"]]
    assert begins == [f'<tool_call>\n{{"name": "{name}", "arguments": ' for name in "fg"]
    schemas = [tag["content"]["json_schema"] for tag in form["tags"]]
    assert schemas == [SCHEMA, {"type": "object"}]


def test_one_call_where_calls_are_not_parallel(served: Served) -> None:
    """The grammar ends with the first."""
    held = wanted(served, tools=[STRICT], parallel_tool_calls=False)
    assert held is not None
    assert json.loads(held.structural_tag or "")["format"]["stop_after_first"] is True


def test_nothing_is_held_where_nothing_is_strict(served: Served) -> None:
    """Nor where no tool may be called."""
    assert wanted(served, tools=[LOOSE]) is None
    assert wanted(served, tools=[STRICT], tool_choice="none") is None


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": "a+"}},
        {"tools": [STRICT]},
        {"tools": [STRICT], "tool_choice": "required"},
    ],
)
def test_a_form_begins_behind_a_thought(served: Served, fields: Any) -> None:
    """Unless the prompt has closed it."""
    held, closed = wanted(served, **fields), wanted(served, **fields, **CLOSED)
    assert held is not None
    assert closed is not None

    assert held.reasoning == THINK
    assert closed.reasoning is None
    assert held.kind == closed.kind


@pytest.mark.parametrize(
    ("content", "span"),
    [
        ("Well: ", None),
        ("<think>Hm.</think>", None),
        ([{"type": "text", "text": "<think>Hm"}], ReasoningSpan(close="</think>")),
    ],
)
def test_an_answer_that_goes_on_is_in_its_form_from_there_on(
    served: Served, content: Any, span: ReasoningSpan | None
) -> None:
    chat = [*CHAT, {"role": "assistant", "content": content}]
    form: Any = {"structured_outputs": {"regex": "a+"}}
    held = wanted(served, **form, messages=chat, continue_final_message=True)

    assert held is not None
    assert held.reasoning == span


def test_a_thought_before_forced_calls_is_told_apart(served: Served) -> None:
    """A call of tools behind it is a call."""
    calls = '<think>Hm.</think>\n[{"name": "f", "parameters": {"a": 1}}]'
    served.workers[0].answer = served.tokenizer.encode(calls, add_special_tokens=False)
    body = {"model": "fake", "messages": CHAT, "tools": [STRICT], "tool_choice": "required"}
    message = served.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]

    assert message["reasoning"] == "Hm."
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1}'}
    assert not message["content"]


@pytest.mark.parametrize("parser", sorted(TOOL_FORMATS))
def test_strict_tools_are_accepted_in_every_format(parser: str) -> None:
    """A grammar holds them, or the answer reports that they are best effort."""
    format_ = TOOL_FORMATS[parser]
    body = ChatBody.model_validate({"messages": CHAT, "tools": [LOOSE, STRICT]})
    check_strict(body, format_)
    form = strict_calls.strict_form(body, format_)

    assert bool(form) is (body.ignored == [])
    assert body.ignored in ([], ["tools.strict"])


@pytest.fixture(scope="module")
def tagged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A model that writes parameters between tags."""
    folder = tmp_path_factory.mktemp("tagged-model")
    write_model(folder)
    worker = FakeWorker(WorkerRole.DECODE, max_model_len=20_000)
    app = Served(str(folder), [worker], tool_call_parser="qwen3_xml")
    yield app
    app.stop()
    worker.stop()


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({"type": "function", "function": {"strict": True}}, "tools[1].function.name"),
        ({"type": "function", "function": {"name": 5}}, "tools[1].function.name"),
        ({"type": "function", "function": "f"}, "tools[1].function"),
        ({"type": "function"}, "tools[1].function"),
    ],
)
@pytest.mark.parametrize("between_tags", [False, True])
def test_what_is_no_tool_is_refused_beside_a_strict_one(
    served: Served, tagged: Served, between_tags: bool, tool: Any, param: str
) -> None:
    """Before a grammar is made of all."""
    app = tagged if between_tags else served
    body = {"model": "fake", "messages": CHAT, "tools": [STRICT, tool]}
    answer = app.post("/v1/chat/completions", json=body)

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize(
    "schema",
    [
        {"required": 5},
        {"required": [["a"]]},
        {"properties": {"a": {"type": "string", "enum": 5}}},
        {"properties": {"a": {"type": "string", "enum": "bc"}}},
        {"properties": {"a": {"type": "string", "anyOf": 5}}},
        {"properties": {"a": {"type": "string", "oneOf": 5}}},
        {"properties": {"a": {"type": "string", "minLength": "5"}}},
        {"properties": {"a": {"type": "string", "maxLength": [5]}}},
        {"properties": {"a": {"type": "string", "maxLength": -1}}},
        {"properties": {"a": {"type": "string", "maxLength": 0.5}}},
    ],
)
def test_tools_whose_keywords_are_of_the_wrong_type_are_best_effort(
    tagged: Served, schema: Any
) -> None:
    """Between tags, where a schema is taken apart."""
    tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": schema}}
    body = {"model": "fake", "messages": CHAT, "tools": [tool]}
    answer = tagged.post("/v1/chat/completions", json=body)

    assert answer.status_code == 200, answer.text
    assert answer.headers["x-tandem-ignored"] == "tools.strict"


def test_lengths_of_a_text_between_tags_are_integers_as_json_has_them(tagged: Served) -> None:
    schema = {"properties": {"a": {"type": "string", "minLength": 2.0, "maxLength": 4}}}
    tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": schema}}
    held = wanted(tagged, tools=[tool])

    assert held is not None
    assert r"[^<\\n]{2,4}" in (held.structural_tag or "")


def many_required(count: int) -> Any:
    """A strict tool of many parameters, each of which must be there."""
    names = [f"parameter_{each}" for each in range(count)]
    schema = {"properties": {name: {"type": "integer"} for name in names}, "required": names}
    return {"type": "function", "function": {"name": "f", "strict": True, "parameters": schema}}


@pytest.mark.parametrize(
    ("path", "tool", "param"),
    [
        ("/v1/chat/completions", many_required(9_000), "tools[0].function.parameters"),
        ("/v1/responses", many_required(9_000), "tools[0].parameters"),
        ("/v1/messages", many_required(9_000), "tools[0].input_schema"),
    ],
)
def test_large_schemas_are_looked_at_in_a_thread_and_those_too_large_not_at_all(
    tagged: Served, monkeypatch: pytest.MonkeyPatch, path: str, tool: Any, param: str
) -> None:
    """The loop turns for others, and what no grammar could hold is not taken apart."""
    threads: list[str] = []
    walked: list[object] = []

    def check(*given: Any) -> None:
        threads.append(threading.current_thread().name)
        check_strict(*given)

    def form(*given: Any) -> Any:
        walked.append(given)
        return parameters_form(*given)

    monkeypatch.setattr(answer_reader, "check_strict", check)
    monkeypatch.setattr(strict_calls, "parameters_form", form)
    function = tool["function"]
    if path == "/v1/messages":
        tool = {"name": "f", "strict": True, "input_schema": function["parameters"]}
    elif path == "/v1/responses":
        tool = {"type": "function", **function}
    is_response = path == "/v1/responses"
    asked = {"input" if is_response else "messages": CHAT}
    most = {"max_output_tokens" if is_response else "max_tokens": 9}
    answer = tagged.post(path, json={"model": "fake", **asked, **most, "tools": [tool]})
    is_large = len(json.dumps(function["parameters"])) > MAX_SCHEMA_BYTES

    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(f"{param}: ")
    assert is_large
    assert not walked
    assert [name[:6] for name in threads] == ["beside"]


@pytest.mark.parametrize(
    ("tools", "allowed"),
    [
        ([many_required(1_000)] * 4, "of at most 131,072 bytes together; up to tools[2] they have"),
    ],
)
def test_tools_that_are_too_large_together_are_refused_by_name(
    served: Served, tools: list[Any], allowed: str
) -> None:
    """Each by itself would do; what a client did not write is not shown to it."""
    for tool in (tools[0], tools[-1]):
        wanted(served, tools=[tool])
    body = {"model": "fake", "messages": CHAT, "tools": tools}
    error = served.post("/v1/chat/completions", json=body).json()["error"]

    assert error["param"] == "tools"
    assert error["message"].startswith('tools: [{"type": "function", ')
    assert allowed in error["message"]


def test_no_more_strict_tools_are_taken_apart_than_fit(
    tagged: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each in both ways in which this model may write a call. A hundred of them took a thread for
    ten seconds."""
    walked: list[object] = []

    def form(*given: Any) -> Any:
        walked.append(given)
        return parameters_form(*given)

    monkeypatch.setattr(strict_calls, "parameters_form", form)
    tools = [many_required(1_000)] * 50
    body = {"model": "fake", "messages": CHAT, "tools": tools}
    assert tagged.post("/v1/chat/completions", json=body).status_code == 400
    assert not walked


@pytest.mark.parametrize("tools", [[many_required(600)], [STRICT, *[LOOSE] * 1_020]])
def test_tools_beyond_the_bounds_of_a_grammar_are_best_effort(
    tagged: Served, tools: list[Any]
) -> None:
    """An agent with more or larger tools than a grammar takes is served all the same."""
    body = {"model": "fake", "messages": CHAT, "tools": tools}
    answer = tagged.post("/v1/chat/completions", json=body)

    assert answer.status_code == 200, answer.text
    assert answer.headers["x-tandem-ignored"] == "tools.strict"


@pytest.mark.parametrize("tool", [STRICT, LOOSE])
def test_an_answer_with_tools_and_a_response_format_is_calls_or_has_the_form(
    served: Served, tool: Any
) -> None:
    """The form alone would bar every call."""
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    held = wanted(served, tools=[tool], response_format=form, **CLOSED)
    assert held is not None
    calls, words = json.loads(held.structural_tag or "")["format"]["elements"]

    assert [tag["begin"][:11] for tag in calls["tags"]] == ["<tool_call>"]
    assert words == {"type": "json_schema", "json_schema": SCHEMA}
    alone = wanted(served, tools=[tool], tool_choice="none", response_format=form)
    assert alone is not None
    assert json.loads(alone.json or "") == SCHEMA
