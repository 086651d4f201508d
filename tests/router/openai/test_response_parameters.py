"""Each parameter of a response is done, is information, or refused by name, as its page has it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from openai.types.responses import response_create_params
from tests.router.fake_worker import FakeWorker
from tests.router.http_server import Served
from tests.router.openai.parameters_page import listed
from tests.router.openai.test_parameters import TEMPLATE, odd_value

from tandem.router.api.openai.bodies import parameters
from tandem.router.api.openai.responses.body import ResponsesBody

Make = Callable[..., FakeWorker]
Serve = Callable[..., Served]
See = Callable[[SimpleNamespace], object]
PAGE = Path(__file__).parents[3] / "docs" / "responses.md"
BODY: dict[str, Any] = {"input": "Hi", "max_output_tokens": 2}
LOGPROBS = ["message.output_text.logprobs"]
TOOL: dict[str, Any] = {"type": "function", "name": "f"}
SAME: dict[str, Any] = {
    "temperature": 0.5, "top_p": 0.5, "top_k": 3, "min_p": 0.25, "presence_penalty": 0.5,
    "frequency_penalty": 0.5, "repetition_penalty": 1.5, "ignore_eos": True, "seed": 5,
    "stop": ["x"],
}  # fmt: skip


def done() -> set[str]:
    section = PAGE.read_text().split("## Parameters\n")[1].split("\n## ")[0]
    return set(re.findall(r"^\| `([\w.\[\]]+)` \|", section, re.MULTILINE))


def test_the_page_the_schema_and_the_package_know_the_same() -> None:
    """No name of the package's is left to chance, and the page tells nothing else."""
    known = set(response_create_params.ResponseCreateParamsBase.__annotations__) | {"stream"}
    refused = {
        *parameters.RESPONSES,
        *(f"reasoning.{name}" for name in parameters.RESPONSE_REASONING),
        *(f"tools[].{name}" for name in parameters.RESPONSE_TOOL),
        *(f"input[].{name}" for name in parameters.RESPONSE_ITEM),
    }

    body = ResponsesBody

    hinted = listed("Hints", "responses")

    assert done() - {"include", "reasoning.effort"} <= set(body.model_fields)
    assert set(body.model_fields) <= done() | hinted
    assert set(body.HINTS) <= hinted
    assert listed("Refused", "responses") == refused
    assert known <= done() | hinted | refused


def passes(name: str) -> See:
    """The worker has the value under the same name."""
    value = tuple(SAME[name]) if isinstance(SAME[name], list) else SAME[name]
    return lambda seen: getattr(seen.params, name) == value


EFFECTS: dict[str, tuple[Mapping[str, Any], See]] = {
    **{name: ({name: value}, passes(name)) for name, value in SAME.items()},
    "model": ({"model": "fake"}, lambda seen: seen.answer["model"] == "fake"),
    "input": ({"input": "Well"}, lambda seen: "Well" in seen.prompt),
    "instructions": ({"instructions": "Be"}, lambda seen: seen.prompt.startswith("Be")),
    "store": ({"store": False}, lambda seen: not seen.stored),
    "tools": ({"tools": [TOOL], "tool_choice": "none"}, lambda seen: "TOOL f" in seen.prompt),
    "tool_choice": (
        {"tools": [TOOL], "tool_choice": "required"},
        lambda seen: seen.params.structured_outputs,
    ),
    "parallel_tool_calls": (
        {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
        lambda seen: '"maxItems":1,' in seen.params.structured_outputs.json,
    ),
    "text": (
        {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "null"}}}},
        lambda seen: seen.params.structured_outputs.json == '{"type":"null"}',
    ),
    "reasoning": ({"reasoning": {"effort": "low"}}, lambda seen: "EFFORT low" in seen.prompt),
    "include": ({"include": LOGPROBS}, lambda seen: seen.params.logprobs == 0),
    "top_logprobs": (
        {"include": LOGPROBS, "top_logprobs": 3},
        lambda seen: seen.params.logprobs == 3,
    ),
    "max_output_tokens": ({"max_output_tokens": 1}, lambda seen: seen.params.max_tokens == 1),
    "truncation": ({"truncation": "auto"}, lambda seen: seen.answer["truncation"] == "auto"),
    "stream": ({"stream": True}, lambda seen: "event: response.created" in seen.http.text),
    "chat_template_kwargs": (
        {"chat_template_kwargs": {"reasoning_effort": "kw"}},
        lambda seen: "EFFORT kw" in seen.prompt,
    ),
    "cache_salt": ({"cache_salt": "s"}, lambda seen: seen.request.cache_salt == "s"),
    "priority": ({"priority": 2}, lambda seen: seen.request.priority == 2),
    "request_id": (
        {"request_id": "mine"},
        lambda seen: (
            seen.http.headers["x-request-id"] == "mine" and "mine" not in seen.answer["id"]
        ),
    ),
}


@pytest.fixture
def reader(serve: Serve, decode: Make) -> Served:
    """A server that allows what may be allowed, of a model whose template reads everything."""
    served = serve(decode(), allow_request_priority=True)
    templates: Any = served.app.state.service.llm.tokenizer.chat_templates
    templates._sources["default"] = TEMPLATE
    return served


def ask(served: Served, extra: Mapping[str, Any]) -> SimpleNamespace:
    """What the workers got and the client saw, with more in the body."""
    answer = served.post("/v1/responses", json={**BODY, **extra})
    assert answer.status_code == 200, answer.text
    request = served.workers[-1].submitted[-1]
    return SimpleNamespace(
        request=request,
        params=request.params,
        prompt=served.tokenizer.decode(list(request.prompt_token_ids)),
        answer=None if extra.get("stream") else answer.json(),
        http=answer,
        stored=len(served.app.state.responses) > 0,
    )


def test_what_is_done_has_an_effect(reader: Served) -> None:
    """Each row under Done is tried; the store has a test of its own for earlier turns."""
    store = ask(reader, {})
    assert store.stored
    reader.app.state.responses.remove("", store.answer["id"])
    without = [
        name
        for name, (extra, effect) in sorted(EFFECTS.items(), key=lambda each: each[0] != "store")
        if not effect(ask(reader, extra))
    ]

    assert without == []
    assert set(EFFECTS) | {"previous_response_id"} == done()


TOOLS: Any = [TOOL]
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"background": True}, "background"),
    ({"tools": [{**TOOL, "defer_loading": 1}]}, "tools[0].defer_loading"),
    ({"tools": [{**TOOL, "parametres": {}}]}, "tools[0].parametres"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "g"}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice"),
    (
        {
            "tools": TOOLS,
            "tool_choice": "required",
            "text": {"format": {"type": "json_object"}},
        },
        "tool_choice",
    ),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"include": ["reasoning.text"]}, "include[0]"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"include": LOGPROBS, "top_logprobs": 1000}, "top_logprobs"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"text": {"verbosity": 1}}, "text.verbosity"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
    ({"reasoning": {"summary": True}}, "reasoning.summary"),
    ({"reasoning": {"effort": "lowest"}}, "reasoning.effort"),
    ({"temperature": 3}, "temperature"),
    ({"input": []}, "input"),
    ({"input": [{"type": "item_reference", "id": "i"}]}, "input[0].type"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user", "content": 5}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": "a", "contnt": 1}]}, "input[0].contnt"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input[0].content[0]",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "x", "a": 1}]}]},
        "input[0].content[0].a",
    ),
    (
        {"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]},
        "input[0].call_id",
    ),
    ({"input": [{"type": "function_call", "call_id": 5}]}, "input[0].call_id"),
    ({"input": [{"type": "reasoning", "encrypted_content": 5}]}, "input[0].encrypted_content"),
    ({"input": [{"type": "reasoning", "content": ["x"]}]}, "input[0].content[0]"),
    ({"input": [{"role": "user", "content": "a", "phase": 5}]}, "input[0].phase"),
    ({"stream_options": {"include_obfuscation": 5}}, "stream_options"),
    ({"stream_options": {"include_usage": False}}, "stream_options"),
    ({"temprature": 1}, "temprature"),
]


@pytest.mark.parametrize(("extra", "param"), REFUSED)
def test_refusals_name_the_field(well: Served, extra: dict[str, Any], param: str) -> None:
    """As the client wrote it, with the value and what is allowed."""
    answer = well.post("/v1/responses", json={**BODY, **extra})
    error = answer.json()["error"]

    assert (answer.status_code, error["param"]) == (400, param), answer.text
    assert error["message"].startswith(f"{param}: ")


def test_values_that_ask_for_nothing_pass(well: Served) -> None:
    """null and each neutral value of what is refused; anything else is refused with the reason."""
    for name, refused in parameters.RESPONSES.items():
        for value in (None, *refused.neutral):
            answer = well.post("/v1/responses", json={**BODY, name: value})
            assert answer.status_code == 200, answer.text
        answer = well.post("/v1/responses", json={**BODY, name: odd_value(refused)})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, name)
        assert refused.why in error["message"]


def test_information_has_a_shape(well: Served) -> None:
    """What changes no answer is checked all the same, and the answer has it."""
    for name in set(ResponsesBody.HINTS) & set(ResponsesBody.model_fields):
        value: Any = {"a": "b"} if name == "metadata" else "someone"
        answer = well.post("/v1/responses", json={**BODY, name: value})
        assert answer.json()[name] == value
        for wrong in (17, "x" * 513):
            answer = well.post("/v1/responses", json={**BODY, name: wrong})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
