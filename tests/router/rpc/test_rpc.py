"""gRPC by a client of reflection: the same answers, limits and errors as over HTTP."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.own_ports import own_ports
from tests.router.fake_worker import FakeWorker, Turn
from tests.router.http_server import ANSWER, Served
from tests.router.openai.test_tool_calls import write_model
from tests.router.rpc_client import RpcClient
from tests.waiting import wait_for

from tandem.protocol.errors import InvalidParameter
from tandem.router import app
from tandem.router.config import RouterConfig

Serve = Callable[..., Served]
Make = Callable[..., FakeWorker]
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
TIMES = (0.5, 4.0, 30.0)
"""Deadlines of a call, one after the other until it has reached its worker by one."""


def hold(turn: Turn) -> Iterator[float]:
    turn.accept()
    yield 60.0


def say_one(turn: Turn) -> Iterator[float]:
    turn.accept()
    turn.token(0)
    yield 60.0


@pytest.fixture
def dial(serve: Serve, decode: Make) -> Iterator[Callable[..., tuple[Served, RpcClient]]]:
    """Start an app with gRPC over a worker, and a client of it."""
    clients: list[RpcClient] = []

    def dial(worker: FakeWorker | None = None, key: str | None = None, **settings: Any) -> Any:
        worker = worker or decode()  # first: it takes a port of its own
        (port,) = own_ports(1)
        served = serve(worker, grpc_port=port, **settings)
        clients.append(RpcClient(port, key))
        return served, clients[-1]

    yield dial
    for client in clients:
        client.close()


def code_of(failed: Any) -> grpc.StatusCode:
    code: grpc.StatusCode = failed.value.code()
    return code


def details(failed: Any) -> str:
    return str(failed.value.details())


def trailing(failed: Any) -> dict[str, str]:
    return dict(failed.value.trailing_metadata())


def test_what_is_generated_is_what_http_answers(dial: Any) -> None:
    """A text, token ids and a chat; whole and step by step."""
    served, client = dial()
    for given in (
        {"prompt": "Hi"},
        {"tokens": {"ids": served.tokenizer.encode("Hi", add_special_tokens=False)}},
        {"chat": CHAT},
    ):
        sampling = {"max_tokens": 200, "logprobs": 1}
        (whole,) = client.call("Generate", **given, sampling=sampling, request_id="mine")
        steps = client.call("Generate", **given, sampling=sampling, stream=True)

        assert whole["request_id"] == "mine"
        choice = whole["choices"][0]
        assert choice["text"] == ANSWER
        assert choice["finish_reason"] == "stop"
        assert len(choice["logprobs"]) == len(choice["token_ids"])
        assert choice["logprobs"][0]["tokens"][0]["id"] == choice["token_ids"][0]
        assert "".join(c.get("text", "") for s in steps for c in s.get("choices", ())) == ANSWER
        assert len(steps) > 3
        assert steps[-1]["usage"] == whole["usage"]
        assert whole["usage"]["completion_tokens"] == len(choice["token_ids"])


def test_sampling_parameters_reach_workers(dial: Any) -> None:
    """Under the names that HTTP has."""
    served, client = dial()
    form = {"json": '{"type":"integer"}'}
    sampling = {
        "n": 2,
        "max_tokens": 3,
        "temperature": 0.5,
        "top_k": 4,
        "seed": "7",
        "stop": ["zz"],
        "logit_bias": {"5": 1.5},
        "structured_outputs": form,
    }
    (whole,) = client.call("Generate", prompt="Hi", sampling=sampling, cache_salt="s")
    request = served.workers[0].submitted[-1]
    params = request.params

    assert len(whole["choices"]) == 2
    assert (params.n, params.max_tokens, params.temperature, params.top_k) == (2, 3, 0.5, 4)
    assert (params.seed, params.logit_bias) == (7, {5: 1.5})
    assert params.structured_outputs is not None
    assert json.loads(params.structured_outputs.json or "") == {"type": "integer"}
    assert request.cache_salt == "s"


def test_what_logits_processors_are_told_reaches_workers(dial: Any) -> None:
    """Texts, numbers and lists by name, as HTTP's vllm_xargs; what is no value is named."""
    served, client = dial()
    given = {
        "word": {"values": [{"text": "sea"}]},
        "count": {"values": [{"integer": "3"}]},
        "share": {"values": [{"number": 0.5}]},
        "several": {"values": [{"integer": "1"}, {"text": "b"}], "is_list": True},
        "none": {"is_list": True},
    }
    client.call("Generate", prompt="Hi", sampling={"max_tokens": 3, "vllm_xargs": given})
    told = served.workers[0].submitted[-1].params.extra_args
    expected = {"word": "sea", "count": 3, "share": 0.5, "several": [1, "b"], "none": []}
    assert told == expected
    two = {"values": [{"text": "a"}, {"text": "b"}]}
    wrongs: list[dict[str, Any]] = [{}, {"values": [{}]}, two]
    for wrong in wrongs:
        with pytest.raises(grpc.RpcError) as failed:
            client.call("Generate", prompt="Hi", sampling={"vllm_xargs": {"word": wrong}})
        assert code_of(failed) is grpc.StatusCode.INVALID_ARGUMENT
        assert trailing(failed)["tandem-error-param"] == "vllm_xargs.word"


def test_a_budget_of_thinking_reaches_workers(decode: Make, tmp_path: Path) -> None:
    """Of a chat, with the marks of the model; a text has no thoughts, and is told so."""
    write_model(tmp_path)
    (port,) = own_ports(1)
    served = Served(str(tmp_path), [decode()], grpc_port=port)
    client = RpcClient(port)
    try:
        client.call("Generate", chat=CHAT, sampling={"thinking_token_budget": 5})
        params = served.workers[0].submitted[-1].params
        assert params.thinking_token_budget == 5
        assert params.thinking is not None
        assert params.thinking.close == served.tokenizer.token_id("</think>")
        for fields in (
            {"prompt": "Hi", "sampling": {"thinking_token_budget": 5}},
            {"chat": CHAT, "sampling": {"thinking_token_budget": -2}},
        ):
            with pytest.raises(grpc.RpcError) as failed:
                client.call("Generate", **fields)
            assert code_of(failed) is grpc.StatusCode.INVALID_ARGUMENT
            assert trailing(failed)["tandem-error-param"] == "thinking_token_budget"
    finally:
        client.close()
        served.stop()


def test_vectors_scores_tokens_and_names(dial: Any) -> None:
    served, client = dial()
    http = served.post("/v1/embeddings", json={"input": ["Hi", "there"], "dimensions": 2}).json()
    vectors = client.call("Embed", input=["Hi", "there"], dimensions=2)["data"]
    scored = served.post("/v1/score", json={"text_1": "Hi", "text_2": ["a", "b"]}).json()
    scores = client.call("Score", text_1=["Hi"], text_2=["a", "b"])["scores"]
    ids = served.post("/tokenize", json={"prompt": "Hi there"}).json()["tokens"]
    info = client.call("GetModelInfo")

    for ours, theirs in zip(vectors, http["data"], strict=True):
        assert ours["values"] == pytest.approx(theirs["embedding"])
    assert scores == pytest.approx([each["score"] for each in scored["data"]])
    assert client.call("Tokenize", prompt="Hi there")["tokens"] == ids
    assert client.call("Tokenize", chat=CHAT)["tokens"]
    assert info["names"] == ["fake"]
    assert info["max_model_len"] > 0


@pytest.mark.parametrize(
    ("method", "fields", "param"),
    [
        ("Generate", {"prompt": "Hi", "sampling": {"temperature": -1}}, "temperature"),
        ("Generate", {"prompt": ""}, "prompt"),
        ("Generate", {}, "input"),
        ("Generate", {"prompt": "Hi", "request_id": "\n"}, "request_id"),
        ("Generate", {"prompt": "Hi", "priority": 3}, "priority"),
        ("Generate", {"prompt": "Hi", "sampling": {"max_tokens": 10**6}}, "max_tokens"),
        ("Generate", {"chat": {"messages": []}}, "messages"),
        ("Embed", {}, "input"),
        ("Embed", {"input": ["a"] * 20_000}, "input"),
        ("Score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
        ("Abort", {}, "request_id"),
    ],
)
def test_what_is_wrong_is_named(dial: Any, method: str, fields: Any, param: str) -> None:
    """INVALID_ARGUMENT, with HTTP's words and field."""
    _, client = dial()
    with pytest.raises(grpc.RpcError) as failed:
        client.call(method, **fields)

    assert code_of(failed) is grpc.StatusCode.INVALID_ARGUMENT
    assert param in details(failed)
    assert trailing(failed)["tandem-error-param"] == param


NUMBERS: list[tuple[str, str, Any, str]] = [
    *(
        ("Generate", name, value, name)
        for name in ("temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty")
        for value in ("NaN", "Infinity", "-Infinity")
    ),
    ("Generate", "logit_bias", {"7": "NaN"}, "logit_bias.7"),
    ("Generate", "logit_bias", {str(2**32 - 1): 1.0}, "logit_bias"),
    ("Generate", "n", 0, "n"),
    ("Generate", "n", 2**32 - 1, "n"),
    ("Generate", "min_tokens", 2**32 - 1, "min_tokens"),
    ("Generate", "logprobs", 2**32 - 1, "logprobs"),
    ("Generate", "top_k", -(2**31), "top_k"),
    ("Generate", "stop_token_ids", [2**32 - 1], "stop_token_ids"),
    ("Generate", "allowed_token_ids", [2**32 - 1], "allowed_token_ids"),
    ("Generate", "tokens", {"ids": [2**32 - 1]}, "prompt"),
    ("Generate", "truncate_prompt_tokens", 0, "truncate_prompt_tokens"),
    ("Generate", "truncate_prompt_tokens", -(2**31), "truncate_prompt_tokens"),
    ("Embed", "tokens", [{"ids": [2**32 - 1]}], "input"),
    ("Embed", "dimensions", 0, "dimensions"),
    ("Embed", "dimensions", 2**32 - 1, "dimensions"),
    ("Embed", "truncate_prompt_tokens", -(2**31), "truncate_prompt_tokens"),
    ("Score", "truncate_prompt_tokens", -(2**31), "truncate_prompt_tokens"),
]
"""Numbers that are not finite, and integers at the ends of their fields' types."""


def test_a_number_out_of_range_is_refused_by_its_field(dial: Any) -> None:
    """A worker receives none of them, and none is an internal error."""
    served, client = dial()
    others = {"Embed": {"input": ["Hi"]}, "Score": {"text_1": ["a"], "text_2": ["b"]}}
    for method, name, value, param in NUMBERS:
        fields: dict[str, Any] = {name: value}
        if method == "Generate" and name not in ("tokens", "truncate_prompt_tokens"):
            fields = {"sampling": fields}
        if name != "tokens":
            fields |= others.get(method, {"prompt": "Hi"})
        with pytest.raises(grpc.RpcError) as failed:
            client.call(method, **fields)
        case = (method, name, value, details(failed))
        assert code_of(failed) is grpc.StatusCode.INVALID_ARGUMENT, case
        assert trailing(failed)["tandem-error-param"] == param, case
    assert served.workers[0].submitted == []


def test_unknown_models_and_large_messages(dial: Any) -> None:
    _, client = dial(max_body_bytes=10_000)
    with pytest.raises(grpc.RpcError) as unknown:
        client.call("Generate", prompt="Hi", model="other")
    with pytest.raises(grpc.RpcError) as large:
        client.call("Generate", prompt="a" * 20_000)

    assert code_of(unknown) is grpc.StatusCode.NOT_FOUND
    assert code_of(large) is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_keys_are_asked_for(dial: Any) -> None:
    served, client = dial(key="k", api_key=("k",), served_model_name=("fake",), wait=False)
    served.wait_started()
    wait_for(served.app.state.service.is_served)
    assert client.call("Tokenize", prompt="Hi")["tokens"]
    port = served.app.state.router.config.grpc_port
    for key in (None, "wrong"):
        stranger = RpcClient(port, key)
        with pytest.raises((grpc.RpcError, KeyError)):
            stranger.call("Tokenize", prompt="Hi")
        call: Any = stranger.channel.unary_unary("/tandem.v1.Inference/GetModelInfo")
        with pytest.raises(grpc.RpcError) as failed:
            call(b"", timeout=10, metadata=stranger.metadata)
        assert code_of(failed) is grpc.StatusCode.UNAUTHENTICATED
        health: Any = health_pb2_grpc.HealthStub(stranger.channel)
        answer = health.Check(health_pb2.HealthCheckRequest(), timeout=10)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        stranger.close()


def test_calls_are_aborted_by_their_id(dial: Any, decode: Make) -> None:
    """ABORTED for the caller, a cancel for the worker; another's id ends nothing."""
    worker = decode(behaviour=hold)
    _, client = dial(worker)
    stream = client.start("Generate", prompt="Hi", request_id="long", stream=True)
    wait_for(lambda: worker.submitted)

    assert client.call("Abort", request_id="other") == {}
    assert client.call("Abort", request_id="long") == {"aborted": 1}
    with pytest.raises(grpc.RpcError) as failed:
        list(stream)
    assert code_of(failed) is grpc.StatusCode.ABORTED
    wait_for(lambda: worker.cancelled)


@pytest.mark.parametrize("ends", ["cancel", "deadline"])
def test_who_leaves_costs_nothing_more(dial: Any, decode: Make, ends: str) -> None:
    """A client's cancel and its deadline reach the worker; that it left is counted, as over HTTP,
    and of requests alone."""
    worker = decode(behaviour=hold)
    served, client = dial(worker)
    for timeout in (60.0,) if ends == "cancel" else TIMES:
        stream = client.start("Generate", timeout, prompt="Hi", stream=True)
        if ends == "cancel":
            wait_for(lambda: worker.submitted)
            stream.call.cancel()
        with pytest.raises(grpc.RpcError):
            list(stream)
        if worker.submitted:
            break
    wait_for(lambda: worker.cancelled)
    if ends == "cancel":
        wait_for(lambda: "tandem:router_requests_cancelled_total 1.0" in served.metrics())
        assert 'tandem:router_request_failures_total{reason="timeout"} 0.0' in served.metrics()


def test_a_token_is_told_when_it_comes(dial: Any, decode: Make) -> None:
    _, client = dial(decode(behaviour=say_one))
    stream = client.start("Generate", prompt="Hi", stream=True)

    assert next(iter(stream))["choices"][0]["text"] == ANSWER[0]
    stream.call.cancel()


def test_no_worker_is_unavailable(dial: Any, decode: Make) -> None:
    """With the seconds after which to try again; health says so, too."""
    worker = decode()
    served, client = dial(worker)
    assert client.call("GetModelInfo")["names"] == ["fake"]
    worker.stop()
    wait_for(lambda: not served.app.state.service.is_served(), 10)
    with pytest.raises(grpc.RpcError) as failed:
        client.call("Generate", prompt="Hi")

    assert code_of(failed) is grpc.StatusCode.UNAVAILABLE
    assert trailing(failed)["retry-after"]
    health: Any = health_pb2_grpc.HealthStub(client.channel)
    answer = health.Check(health_pb2.HealthCheckRequest(), timeout=10)
    assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING


def test_a_stream_under_way_is_finished_when_the_router_stops(dial: Any) -> None:
    """Within the drain; later calls are refused."""
    served, client = dial(drain_timeout=10.0)
    stream = iter(client.start("Generate", prompt="Hi", sampling={"max_tokens": 200}, stream=True))
    first = next(stream)
    stopping = threading.Thread(target=served.stop)
    stopping.start()
    rest = list(stream)
    stopping.join(20)

    said = "".join(c.get("text", "") for s in [first, *rest] for c in s.get("choices", ()))
    assert said == ANSWER


def test_without_its_packages_it_is_refused(
    small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "find_spec", lambda name: None)
    with pytest.raises(InvalidParameter, match="grpc_port: 8001 is not allowed; 0, unless"):
        app.create_app(RouterConfig(model=str(small_model), grpc_port=8001))


def test_inputs_of_one_call_have_one_deadline(dial: Callable[..., Any], decode: Make) -> None:
    """The server's, one input after the other: two, and one that begins where the second's timer is
    a moment early."""
    d = decode(step=0.5)
    _, client = dial(d, max_parallel_prompts=1, request_timeout=1.0)
    with pytest.raises(grpc.RpcError) as failed:
        client.call("Embed", input=["a", "b", "c", "d", "e", "f"])

    assert code_of(failed) is grpc.StatusCode.DEADLINE_EXCEEDED
    assert len(d.submitted) <= 3
