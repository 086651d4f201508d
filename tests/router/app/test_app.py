"""The app in trouble and in operation: readiness, faults over HTTP, disconnects, limits, keys."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from tests import clear_text
from tests.router.builders import BUSY
from tests.router.fake_worker import FakeWorker, Turn, serve_well
from tests.router.http_server import ANSWER, Served
from tests.waiting import wait_for

from tandem.protocol.errors import FailCause, InvalidParameter, Refusal, RefusalCode
from tandem.router.app import create_app
from tandem.router.config import RouterConfig

Make = Callable[..., FakeWorker]
Serve = Callable[..., Served]
CHAT: Any = [{"role": "user", "content": "What is the capital of France?"}]
BODY: Any = {"model": "fake", "messages": CHAT}


def refuse(code: RefusalCode) -> Callable[[Turn], Iterator[float]]:

    def behaviour(turn: Turn) -> Iterator[float]:
        turn.refuse(Refusal(code=code, message=f"no: {code}", param="top_k"))
        yield from ()

    return behaviour


def error_at_the_end(answer: httpx.Response) -> Any:
    """Return the error that ends a stream of OpenAI's API."""
    *_, error, end = answer.text.strip().split("\n\n")
    assert end == "data: [DONE]"
    return json.loads(error.removeprefix("data: "))["error"]


def test_no_worker_is_503(serve: Serve, decode: Make) -> None:
    d = decode()
    served = serve(d)
    d.stop()
    wait_for(lambda: not served.get("/debug/fleet")["workers"])

    answer = served.post("/v1/chat/completions", json=BODY)
    with served.client() as client, pytest.raises(openai.InternalServerError):
        client.chat.completions.create(**BODY)

    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.json()["error"]["type"] == "server_error"
    assert served.get("/v1/models")["data"] == []
    assert served.post("/tokenize", json={"prompt": "x"}).json()["max_model_len"] is None


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (RefusalCode.INVALID, 400),
        (RefusalCode.NEVER_FITS, 400),
        (RefusalCode.UNSUPPORTED, 400),
        (RefusalCode.CAPACITY, 503),
        (RefusalCode.DRAINING, 503),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals(serve: Serve, decode: Make, code: RefusalCode, status: int, stream: bool) -> None:
    """The status is decided before headers are sent, streamed or not."""
    served = serve(decode(behaviour=refuse(code)))

    answer = served.post("/v1/chat/completions", json={**BODY, "stream": stream})

    assert answer.status_code == status
    assert answer.json()["error"]["code"] == str(code)
    if status == 400:
        assert answer.json()["error"]["param"] == "top_k"
    else:
        assert "retry-after" in answer.headers


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_after_the_request_was_taken(serve: Serve, decode: Make, stream: bool) -> None:
    """What a worker finds out only when it looks closer is 400 in its words; no other is asked."""

    def look_closer(turn: Turn) -> Iterator[float]:
        turn.accept()
        yield 0.05
        message = "structured_outputs.regex: '(a' is not allowed; unclosed group"
        param = "structured_outputs.regex"
        turn.refuse(Refusal(code=RefusalCode.INVALID, message=message, param=param))

    workers = [decode(behaviour=look_closer), decode(behaviour=look_closer)]
    served = serve(*workers)
    body = {**BODY, "stream": stream, "structured_outputs": {"regex": "(a"}}
    answer = served.post("/v1/chat/completions", json=body)

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "structured_outputs.regex"
    assert "unclosed group" in answer.json()["error"]["message"]
    assert sum(len(each.submitted) for each in workers) == 1


def test_failure_after_headers_is_an_event(serve: Serve, decode: Make) -> None:
    """Tokens were sent, nobody can go on: the stream says so, with the reasons, and ends."""

    def breaks(turn: Turn) -> Iterator[float]:
        turn.accept()
        for position in range(3):
            turn.token(position)
            yield 0.005
        turn.fail(FailCause.INTERNAL)

    served = serve(decode(behaviour=breaks))
    answer = served.post("/v1/chat/completions", json={**BODY, "stream": True})

    assert answer.status_code == 200
    assert "internal" in error_at_the_end(answer)["message"]
    with served.client() as client, pytest.raises(openai.APIError, match="internal"):
        list(client.chat.completions.create(stream=True, **BODY))


def test_failover_is_invisible(serve: Serve, prefill: Make, decode: Make) -> None:
    """The decode worker dies in mid-stream; the client sees the same text."""

    def dies(turn: Turn) -> Iterator[float]:
        steps = serve_well(turn)
        for _ in range(5):
            yield next(steps)
        turn.worker._stop.set()
        yield 1.0

    d = decode(behaviour=dies)
    served = serve(prefill(), d, decode(load=BUSY))
    with served.client() as client:
        texts = [
            "".join(
                chunk.choices[0].delta.content or ""
                for chunk in client.chat.completions.create(stream=True, **BODY)
            )
            for _ in range(3)
        ]

    assert texts == [ANSWER] * 3
    assert not d._thread.is_alive()


def test_deadline_is_504(serve: Serve, decode: Make) -> None:
    """A request that takes too long ends with the reason; a stream that has begun, in an event."""
    served = serve(decode(step=0.5), request_timeout=0.3)

    answer = served.post("/v1/completions", json={"model": "fake", "prompt": "Hi"})
    silent = served.post("/v1/completions", json={"model": "fake", "prompt": "Hi", "stream": True})

    assert (answer.status_code, silent.status_code) == (504, 200)
    assert answer.json()["error"]["code"] == error_at_the_end(silent)["code"] == "timeout"


@pytest.mark.parametrize(
    ("status", "age", "code"), [(429, 60.0, "rate_limit_exceeded"), (503, 0.5, "overloaded")]
)
def test_full_is_429(serve: Serve, decode: Make, status: int, age: float, code: str) -> None:
    """A full queue refuses at once, an old one later; both say when to come again."""
    release = threading.Event()

    def held(turn: Turn) -> Iterator[float]:
        while not release.is_set():
            yield 0.01
        yield from serve_well(turn)

    d = decode(behaviour=held)
    served = serve(
        d,
        max_inflight_requests=1,
        max_queued_requests=1,
        max_queue_age=age,
        worker_wait=0.0,
        beat_timeout=10.0,
    )
    waiting = re.compile(r"^vllm:num_requests_waiting\S* 1\.0$", re.M)

    def ask() -> httpx.Response:
        return served.post("/v1/chat/completions", json={**BODY, "max_tokens": 4})

    with ThreadPoolExecutor(2) as threads:
        runs = threads.submit(ask)
        wait_for(lambda: d.submitted)
        waits = threads.submit(ask)
        if status == 429:
            wait_for(lambda: waiting.search(served.metrics()))
        refused = ask() if status == 429 else waits.result()
        release.set()
        answers = [runs.result(), waits.result()]

    assert refused.status_code == status
    assert "retry-after" in refused.headers
    assert refused.json()["error"]["code"] == code
    assert {each.status_code for each in answers if each is not refused} == {200}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("step", [0.02, 60.0])
def test_disconnect_cancels(
    serve: Serve, prefill: Make, decode: Make, stream: bool, step: float
) -> None:
    """In mid-stream, before the first token, or without a stream: CANCEL, long before the next
    token comes."""
    p, d = prefill(step=step), decode(step=step)
    served = serve(p, d)
    connection = served.raw_post("/v1/chat/completions", {**BODY, "stream": stream})
    wait_for(lambda: d.submitted)
    if stream and step < 1:
        assert b"200 OK" in connection.recv(4096)
    connection.close()

    wait_for(lambda: d.cancelled and p.cancelled)
    wait_for(lambda: "vllm:num_requests_running 0.0" in served.metrics())
    assert "tandem:router_requests_cancelled_total 1.0" in served.metrics()


def test_disconnect_of_a_batch(serve: Serve, decode: Make) -> None:
    """Every prompt of a batch is cancelled."""
    d = decode(step=0.05)
    served = serve(d)
    body = {"model": "fake", "prompt": ["a", "b", "c"], "max_tokens": 100}
    connection = served.raw_post("/v1/completions", body)
    wait_for(lambda: len(d.submitted) == 3)
    connection.close()

    wait_for(lambda: len(d.cancelled) == 3)


def test_an_error_ends_a_batch(serve: Serve, decode: Make) -> None:
    """One prompt fails: the call fails, and the others are cancelled."""

    def second_fails(turn: Turn) -> Iterator[float]:
        if len(turn.worker.submitted) == 2:
            turn.refuse(Refusal(code=RefusalCode.INVALID, message="not this one", param="prompt"))
        else:
            yield from serve_well(turn)

    d = decode(step=0.05, behaviour=second_fails)
    served = serve(d)
    answer = served.post(
        "/v1/completions", json={"model": "fake", "prompt": ["a", "b", "c"], "max_tokens": 50}
    )

    assert answer.status_code == 400
    wait_for(lambda: len(d.cancelled) == 2)


def test_body_limit(serve: Serve, decode: Make) -> None:
    """Declared or not, a body above the limit is refused."""
    served = serve(decode(), max_body_bytes=1000)
    large = b"x" * 2000

    declared = served.post("/v1/completions", content=large)
    streamed = served.post("/v1/completions", content=iter([large[:900], large[900:]]))

    assert declared.status_code == streamed.status_code == 413
    assert declared.json()["error"]["code"] == "request_too_large"
    assert streamed.json()["error"]["code"] == "request_too_large"
    assert served.post("/v1/chat/completions", json=BODY).status_code == 200


def test_body_that_does_not_come(serve: Serve, decode: Make) -> None:
    """Half a body: 408 after a while; a client that leaves before that is just gone."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"
    impatient = serve(decode(), body_timeout=0.2)
    with socket.create_connection(impatient.socket.getsockname()) as slow:
        slow.sendall(head)
        assert b"408" in slow.recv(4096)
    served = serve(decode(), body_timeout=30.0)
    with socket.create_connection(served.socket.getsockname()) as leaving:
        leaving.sendall(head)

    wait_for(lambda: "tandem:router_requests_cancelled_total 1.0" in served.metrics())
    assert served.post("/v1/chat/completions", json=BODY).status_code == 200


def test_api_key(serve: Serve, decode: Make) -> None:
    """Asked for on the API, not on the probes."""
    served = serve(decode(), wait=False, api_key=("secret",))
    wait_for(lambda: served.server.started)
    wait_for(lambda: clear_text.get(served.url + "/ready").status_code == 200)

    with served.client(api_key="wrong") as client, pytest.raises(openai.AuthenticationError):
        client.models.list()
    with served.client(api_key="secret") as client:
        assert client.models.list().data
    assert served.post("/tokenize", json={"prompt": "x"}).status_code == 401


def test_metrics_and_version(serve: Serve, prefill: Make, decode: Make) -> None:
    """vLLM's names where the meaning is the same, ours beside them."""
    served = serve(
        prefill(), decode(num_cached=16), served_model_name=("m", "alias"), access_log=True
    )
    chat = {**BODY, "model": "alias"}
    assert served.post("/v1/chat/completions", json=chat).json()["model"] == "alias"
    text = served.metrics()

    assert served.get("/version")["version"]
    assert [model["id"] for model in served.get("/v1/models")["data"]] == ["m", "alias"]
    for line in (
        'vllm:time_to_first_token_seconds_count{model_name="m"} 1.0',
        'vllm:request_success_total{finished_reason="stop",model_name="m"} 1.0',
        'tandem:router_workers{role="prefill",state="up"} 1.0',
        'tandem:router_handoff_links{state="up"} 1.0',
        'tandem:router_links{state="up"} 2.0',
        'tandem:router_attempts_total{kind="first",shape="handoff"} 1.0',
        'http_requests_total{handler="/v1/chat/completions",status="200"} 1.0',
    ):
        assert line in text
    for name in ("vllm:inter_token_latency_seconds", "vllm:e2e_request_latency_seconds"):
        assert f'{name}_count{{model_name="m"}}' in text


def test_reset_prefix_cache(serve: Serve, decode: Make) -> None:
    served = serve(decode(), enable_admin_api=True)
    assert served.post("/reset_prefix_cache").json() == {"ok": True, "message": ""}


def test_own_chat_template(serve: Serve, decode: Make) -> None:
    """Only where the server trusts its clients."""
    d = decode()
    served = serve(d, trust_request_chat_template=True)
    served.post(
        "/v1/chat/completions", json={**BODY, "chat_template": "Say: {{ messages[0].content }}"}
    )

    assert served.tokenizer.decode(d.submitted[0].prompt_token_ids) == "Say: " + CHAT[0]["content"]


def test_needs_a_model_folder() -> None:
    with pytest.raises(InvalidParameter, match="model"):
        create_app(RouterConfig())


def test_openapi_describes_the_bodies(serve: Serve, decode: Make) -> None:
    """The interactive documentation knows the fields."""
    served = serve(decode())
    document = served.get("/openapi.json")
    content = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]
    name = content["application/json"]["schema"]["$ref"].rpartition("/")[2]

    assert "messages" in document["components"]["schemas"][name]["properties"]
