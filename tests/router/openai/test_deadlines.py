"""Deadlines that clients set: by body and header, with an error or with what there is by then."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from tests.router.fake_worker import FakeWorker
from tests.router.http_server import Served
from tests.waiting import wait_for

Make = Callable[..., FakeWorker]
Serve = Callable[..., Served]

BODY = {"model": "fake", "prompt": "Hi", "max_tokens": 20}
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20}
CALLS = [("/v1/completions", BODY), ("/v1/chat/completions", CHAT)]
GENERATED_NONE = 'vllm:generation_tokens_total{model_name="fake"} 0.0'


def in_time(served: Served, path: str, body: dict[str, Any]) -> tuple[httpx.Response, float, int]:
    """An answer by a deadline before which a token came, the deadline's seconds, and how many
    before it were too short for a busy machine."""
    late, seconds = 0, 1.6
    while True:
        answer = served.post(path, json={**body, "timeout": seconds})
        has_come = answer.status_code != 504 or GENERATED_NONE not in served.metrics()
        if has_come or late == 2:
            return answer, seconds, late
        late, seconds = late + 1, seconds * 2


def text_of(choice: dict[str, Any]) -> str:
    said = choice.get("text")
    if said is None:
        said = choice.get("message", choice.get("delta", {})).get("content")
    return said or ""


@pytest.mark.parametrize(("path", "body"), CALLS)
@pytest.mark.parametrize("where", ["body", "header"])
def test_a_deadline_of_the_clients_is_504(
    serve: Serve, decode: Make, path: str, body: dict[str, Any], where: str
) -> None:
    """Long before the server's own, and the worker hears of it."""
    d = decode(step=0.5)
    served = serve(d)
    for seconds in (0.7, 4.0, 8.0):  # a busy machine reaches the worker late
        more = {"timeout": seconds} if where == "body" else {}
        headers = {"X-Request-Timeout": str(seconds)} if where == "header" else {}
        answer = served.post(path, json={**body, **more}, headers=headers)
        assert answer.status_code == 504, answer.text
        assert answer.json()["error"]["code"] == "timeout"
        if d.submitted:
            break
    wait_for(lambda: d.submitted and len(d.cancelled) == len(d.submitted))


@pytest.mark.parametrize(("path", "body"), CALLS)
def test_what_there_is_by_then_is_an_answer(
    serve: Serve, decode: Make, path: str, body: dict[str, Any]
) -> None:
    """Tokens that came in time, the reason, and a usage that counts them; nothing goes on."""
    d = decode(step=0.5)
    served = serve(d)
    answer, _, late = in_time(served, path, {**body, "partial_on_timeout": True})
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    assert choice["finish_reason"] == "abort"
    assert text_of(choice)
    assert 0 < answer.json()["usage"]["completion_tokens"] < 20
    wait_for(lambda: d.submitted and len(d.cancelled) == len(d.submitted))
    assert 'finished_reason="abort"' in served.metrics()
    failures = 'tandem:router_request_failures_total{reason="timeout"}'
    assert f"{failures} {late}.0" in served.metrics()


@pytest.mark.full
@pytest.mark.parametrize(("path", "body"), CALLS)
def test_a_stream_ends_with_the_reason(
    serve: Serve, decode: Make, path: str, body: dict[str, Any]
) -> None:
    """Its last chunk says so; without the wish it is an error event."""
    served = serve(decode(step=0.5))
    asked = {**body, "stream": True}
    answer, seconds, _ = in_time(served, path, {**asked, "partial_on_timeout": True})
    lines = [each for each in answer.text.split("\n\n") if each != ": keep-alive"]
    assert lines[-2] == "data: [DONE]"
    chunks = [json.loads(line[6:])["choices"][0] for line in lines[:-2]]
    assert chunks[-1]["finish_reason"] == "abort"
    assert "".join(map(text_of, chunks))
    failed = served.post(path, json={**asked, "timeout": seconds}).text
    assert '"finish_reason":"abort"' not in failed
    assert "deadline" in failed


def test_without_a_token_there_is_no_part(serve: Serve, decode: Make) -> None:
    served = serve(decode(step=2.0))
    answer = served.post(
        "/v1/completions", json={**BODY, "timeout": 0.3, "partial_on_timeout": True}
    )
    assert answer.status_code == 504


@pytest.mark.parametrize("seconds", [0, -1, 0.0001, 86_401, float("1e300")])
def test_deadlines_have_bounds(serve: Serve, decode: Make, seconds: float) -> None:
    served = serve(decode())
    answer = served.post("/v1/completions", json={**BODY, "timeout": seconds})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "timeout"
    headers = {"X-Request-Timeout": str(seconds)}
    answer = served.post("/v1/completions", json=BODY, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "X-Request-Timeout"


@pytest.mark.parametrize("text", ["soon", "nan", "inf", "1,5", ""])
def test_a_header_that_is_no_number_is_refused(serve: Serve, decode: Make, text: str) -> None:
    served = serve(decode())
    answer = served.post("/v1/completions", json=BODY, headers={"X-Request-Timeout": text})
    assert answer.status_code == 400
    assert "0.001 to 86400" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_the_header_counts_everywhere(serve: Serve, decode: Make, path: str) -> None:
    served = serve(decode(step=0.5))
    chat = {"model": "fake", "max_tokens": 20, "messages": CHAT["messages"]}
    body = {"model": "fake", "input": "Hi"} if path == "/v1/responses" else chat
    answer = served.post(path, json=body, headers={"X-Request-Timeout": "0.7"})
    assert answer.status_code == 504, answer.text


BATCH = {"model": "fake", "prompt": ["a", "b", "c", "d", "e", "f"], "max_tokens": 5}
BEGUN = 3
"""Two, and one that begins where the second's timer is a moment early."""


@pytest.mark.full
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_is_the_calls_not_each_prompts(
    serve: Serve, decode: Make, own: bool, stream: bool
) -> None:
    """Six prompts of two seconds, one at a time: three end the call within the second of them."""
    d = decode(step=0.4)
    served = serve(d, max_parallel_prompts=1, **({} if own else {"request_timeout": 3.0}))
    body = {**BATCH, **({"timeout": 3.0} if own else {}), "stream": stream}
    answer = served.post("/v1/completions", json=body)

    if stream:
        events = [each for each in answer.text.split("\n\n") if each != ": keep-alive"]
        assert '"text"' in events[0]
        assert "deadline" in json.loads(events[-3][6:])["error"]["message"]
        assert events[-2] == "data: [DONE]"
    else:
        assert answer.status_code == 504, answer.text
    assert len(d.submitted) <= BEGUN


def test_inputs_that_are_pooled_have_one_deadline(serve: Serve, decode: Make) -> None:
    d = decode(step=0.8)
    served = serve(d, max_parallel_prompts=1)
    body = {"model": "fake", "input": ["a", "b", "c", "d", "e", "f"], "timeout": 1.0}
    answer = served.post("/v1/embeddings", json=body)

    assert answer.status_code == 504, answer.text
    assert len(d.submitted) <= BEGUN
