"""What clients get wrong: a 4xx in OpenAI's shape with the field named; no process ends."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest
from tests import clear_text
from tests.router.http_server import Served

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}]}
TEXT = {"model": "fake", "prompt": "Hi"}
DEEP = '{"items":' * 65 + "{}" + "}" * 65


def refused(answer: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 3.0),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", 1.5),
        ("top_k", -2),
        ("min_p", 2),
        ("seed", "x"),
        ("seed", 10**30),
        ("presence_penalty", 3),
        ("frequency_penalty", -3),
        ("repetition_penalty", 0),
        ("n", 0),
        ("n", 129),
        ("n", "2"),
        ("stop", 5),
        ("stop", ["a"] * 17),
        ("stop", [""]),
        ("stop_token_ids", [50_001]),
        ("stop_token_ids", "x"),
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("min_tokens", -1),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [-1]),
        ("bad_words", [""]),
        ("bad_words", "word"),
        ("prompt_logprobs", -1),
        ("prompt_logprobs", 21),
        ("truncate_prompt_tokens", 0),
        ("truncation_side", "middle"),
        ("stream", "yes"),
        ("request_id", "x" * 300),
        ("logit_bias", [1]),
        ("priority", 1),
        ("cache_salt", "x" * 1025),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_wrong_values(well: Served, path: str, field: str, value: object) -> None:
    """Wrong types and ranges name their field, on both endpoints."""
    body = {**(CHAT if "chat" in path else TEXT), field: value}
    assert refused(well.post(path, json=body))["param"] == field


@pytest.mark.parametrize(
    ("bias", "param"),
    [
        ({"x": 1}, "logit_bias"),
        ({"50001": 1}, "logit_bias"),
        ({"5": 101}, "logit_bias.5"),
        ({"5": "much"}, "logit_bias.5"),
    ],
)
def test_bad_logit_bias(well: Served, bias: object, param: str) -> None:
    answer = well.post("/v1/chat/completions", json={**CHAT, "logit_bias": bias})
    assert refused(answer)["param"] == param


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1, ["a", 2**64]])
def test_arguments_for_logits_processors_fit_64_bits(well: Served, value: object) -> None:
    """What goes to workers holds no more; the largest that fits is taken."""
    answer = well.post("/v1/completions", json={**TEXT, "vllm_xargs": {"word": value}})
    most = well.post("/v1/completions", json={**TEXT, "vllm_xargs": {"word": 2**64 - 1}})

    assert refused(answer)["param"] == "vllm_xargs.word"
    assert most.status_code == 200


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": "hi"}, "messages"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"response_format": {"type": "grammar"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_object", "json_schema": {"schema": {}}}},
            "response_format.json_schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "y": 1}}},
            "response_format.json_schema.y",
        ),
        (
            {
                "response_format": {"type": "json_object"},
                "structured_outputs": {"choice": ["a"]},
            },
            "response_format.type",
        ),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"chat_template": "{{ x }}"}, "chat_template"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"guided_json": {}}, "guided_json"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"choice": ["a"], "regex": "b"}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a", 5]}}, "structured_outputs.choice[1]"),
        ({"structured_outputs": {"choice": "yes"}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a"] * 1001}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["é" * 33_000]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a" * 16_385}}, "structured_outputs.regex"),
        ({"structured_outputs": {"json": 5}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": DEEP}}, "structured_outputs.json"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
        ({"structured_outputs": {"grammar": ""}}, "structured_outputs.grammar"),
        (
            {"structured_outputs": {"regex": "a", "disable_any_whitespace": True}},
            "structured_outputs.disable_any_whitespace",
        ),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
    ],
)
def test_wrong_chats(well: Served, extra: dict[str, Any], param: str) -> None:
    answer = well.post("/v1/chat/completions", json={**CHAT, **extra})
    assert refused(answer)["param"] == param


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [50_001]}, "prompt"),
        ({"prompt": ["a", 5]}, "prompt[1]"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"logprobs": 21}, "logprobs"),
        ({"min_tokens": 20}, "min_tokens"),
    ],
)
def test_wrong_completions(well: Served, extra: dict[str, Any], param: str) -> None:
    answer = well.post("/v1/completions", json={**TEXT, **extra})
    assert refused(answer)["param"] == param


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize"])
@pytest.mark.parametrize("content", [b"", b"{", b"[" * 100_000, b"\xff\xfe", b'"text"', b"[]"])
def test_malformed_bodies(well: Served, path: str, content: bytes) -> None:
    """What is not JSON, or not an object, is told so."""
    error = refused(well.post(path, content=content))
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_missing_fields(well: Served, path: str) -> None:
    """The first missing field is named."""
    error = refused(well.post(path, json={"model": "fake"}))
    assert error["param"] in {"messages", "prompt"}


@pytest.mark.parametrize("max_tokens", [None, 100])
def test_over_long_prompt(well: Served, max_tokens: int | None) -> None:
    body = {**TEXT, "prompt": [5] * 3000, "max_tokens": max_tokens}
    error = refused(well.post("/v1/completions", json=body))

    assert error["code"] == "context_length_exceeded"
    assert "3000" in error["message"]
    assert "2048" in error["message"]


def test_unknown_model(well: Served) -> None:
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)):
        error = refused(well.post(path, json={**body, "model": "other"}), 404)
        assert (error["param"], error["code"]) == ("model", "model_not_found")


def test_unknown_path_and_method(well: Served) -> None:
    """Also in OpenAI's shape; a path that has several methods names them all."""
    nothing = refused(clear_text.get(well.url + "/v1/nothing"), 404)
    refused(clear_text.get(well.url + "/v1/completions"), 405)
    put = httpx.put(well.url + "/v1/responses/resp_1")
    refused(put, 405)
    assert put.headers["allow"] == "DELETE, GET"
    assert nothing["message"]


def test_error_classes_of_the_openai_package(well: Served) -> None:
    with well.client() as client:
        with pytest.raises(openai.BadRequestError) as bad:
            client.chat.completions.create(
                model="fake", messages=[{"role": "user", "content": "x"}], temperature=9
            )
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="other", prompt="x")

    assert bad.value.param == "temperature"
    assert bad.value.type == "invalid_request_error"


def test_request_id_in_bad_form(well: Served) -> None:
    """A header that could break logs is refused."""
    answer = well.post("/v1/completions", json=TEXT, headers={"X-Request-Id": "ü".encode()})
    assert refused(answer)["param"] == "X-Request-Id"


def test_tokenize(well: Served) -> None:
    answer = well.post("/tokenize", json={"prompt": "café", "return_token_strs": True}).json()
    back = well.post("/detokenize", json={"tokens": answer["tokens"]}).json()
    chat = well.post("/tokenize", json={"messages": CHAT["messages"]}).json()

    assert back == {"prompt": "café"}
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 2048
    assert chat["count"] > answer["count"]
    assert refused(well.post("/tokenize", json={"model": "fake"}))["param"] == "prompt"
    assert refused(well.post("/detokenize", json={"tokens": [-1]}))["param"] == "tokens"
    refused(well.post("/detokenize", json={"tokens": [1], "model": "other"}), 404)


def test_nothing_was_left_behind(well: Served) -> None:
    """After all of that nothing runs, and a good request is answered."""
    answer = well.post("/v1/chat/completions", json=CHAT)

    assert answer.status_code == 200
    assert "vllm:num_requests_running 0.0" in well.metrics()
