"""Pooled calls under the router's limits: deadlines, full queues, clients that leave, odd texts."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from tests.router.fake_worker import FakeWorker, Turn
from tests.router.http_server import Served
from tests.waiting import wait_for

from tandem.protocol.card import WorkerRole
from tandem.protocol.pooling import ModelPooling

Make = Callable[..., FakeWorker]
Serve = Callable[..., Served]
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/embeddings", {"input": ["a", "b", "c"]}),
    ("/pooling", {"input": "a"}),
    ("/v1/score", {"text_1": "a", "text_2": ["b", "c"]}),
    ("/v1/rerank", {"query": "a", "documents": ["b", "c"]}),
]
INPUTS = {"/v1/embeddings": 3, "/pooling": 1, "/v1/score": 3, "/v1/rerank": 3}


def waits(turn: Turn) -> Iterator[float]:
    turn.accept()
    while True:
        yield 0.02


def test_a_deadline_is_504_and_ends_every_input(serve: Serve, prefill: Make, decode: Make) -> None:
    """The worker hears of each, and all calls have the deadline together."""
    p = prefill(behaviour=waits)
    served = serve(p, decode(), request_timeout=3.0)
    with ThreadPoolExecutor(len(CALLS)) as threads:
        for answer in threads.map(lambda call: served.post(call[0], json=call[1]), CALLS):
            assert answer.status_code == 504, answer.text
    wait_for(lambda: len(p.cancelled) == len(p.submitted) == sum(INPUTS.values()))


@pytest.mark.parametrize(("path", "body"), CALLS)
def test_a_client_that_leaves_ends_every_input(
    serve: Serve, prefill: Make, decode: Make, path: str, body: dict[str, Any]
) -> None:
    p = prefill(behaviour=waits)
    served = serve(p, decode())
    connection = served.raw_post(path, body)
    wait_for(lambda: len(p.submitted) == INPUTS[path])
    connection.close()
    wait_for(lambda: len(p.cancelled) == INPUTS[path])
    wait_for(lambda: "tandem:router_requests_cancelled_total 1.0" in served.metrics())


def test_inputs_of_one_call_take_turns(serve: Serve, decode: Make) -> None:
    """No more of them are under way than max_parallel_prompts; all are answered."""
    under_way, most = set[int](), [0]

    def counted(turn: Turn) -> Iterator[float]:
        turn.accept()
        under_way.add(id(turn))
        most[0] = max(most[0], len(under_way))
        yield 0.02
        turn.vector()
        under_way.discard(id(turn))

    served = serve(decode(behaviour=counted), max_parallel_prompts=3)
    answer = served.post("/v1/embeddings", json={"input": [f"text {n}" for n in range(20)]})
    assert [item["index"] for item in answer.json()["data"]] == list(range(20))
    assert 1 < most[0] <= 4  # one may begin as another's answer is on its way


def test_a_full_queue_is_429(serve: Serve, decode: Make) -> None:
    """While another call is served; it is told when to come again."""
    release = threading.Event()

    def held(turn: Turn) -> Iterator[float]:
        turn.accept()
        while not release.is_set():
            yield 0.01
        turn.vector()

    d = decode(behaviour=held)
    served = serve(d, max_inflight_requests=1, max_queued_requests=0)
    first: list[httpx.Response] = []
    thread = threading.Thread(
        target=lambda: first.append(served.post("/v1/embeddings", json={"input": "a"}))
    )
    thread.start()
    wait_for(lambda: d.submitted)
    second = served.post("/v1/embeddings", json={"input": "a"})
    release.set()
    thread.join()
    assert (first[0].status_code, second.status_code) == (200, 429), second.text
    assert int(second.headers["Retry-After"]) > 0


def test_nobody_there_is_503(serve: Serve) -> None:
    served = serve(wait=False, worker_wait=0.1)
    served.wait_started()
    for path, body in CALLS:
        assert served.post(path, json=body).status_code == 503


def test_keys_are_asked_for(serve: Serve, decode: Make) -> None:
    served = serve(decode(), api_key=("k",), wait=False)
    served.wait_started()
    for path, body in (*CALLS, ("/classify", {"input": "a"}), ("/score", {}), ("/rerank", {})):
        assert served.post(path, json=body).status_code == 401, path


@pytest.mark.parametrize("labels", [(), ("relevant",)])
@pytest.mark.parametrize(("path", "body"), CALLS)
def test_texts_that_are_no_unicode_or_too_long_are_400(
    serve: Serve, decode: Make, path: str, body: dict[str, Any], labels: tuple[str, ...]
) -> None:
    """Half a character, and more characters than the server looks at."""
    d = decode(pooling=ModelPooling(labels=labels))
    served = serve(d, max_text_chars=100)
    for text in ("\ud800", "x" * 101):
        for name in body:
            asked = {**body, name: [text] if isinstance(body[name], list) else text}
            answer = served.post(path, content=json.dumps(asked))
            assert answer.status_code == 400, (name, answer.text)
    assert d.submitted == []


@pytest.mark.full
def test_a_large_answer_keeps_nobody_waiting(serve: Serve, decode: Make) -> None:
    """Four million values, as numbers and as base64: whole, while others are answered."""

    class Large(FakeWorker):
        def values_of(self, request: Any) -> list[float]:
            return [0.5] * (4 << 20) if len(request.prompt_token_ids) == 4 else [0.25] * 4

    large = Large(WorkerRole.DECODE)
    try:
        served = serve(large, beat_timeout=20.0)  # no beat while it makes millions
        for form in ("float", "base64"):
            body = {"input": "long", "task": "token_embed", "encoding_format": form}
            found: list[httpx.Response] = []
            asking = threading.Thread(
                target=lambda body=body, found=found: found.append(
                    served.post("/pooling", json=body)
                )
            )
            asking.start()
            answered = 0
            while asking.is_alive():
                assert served.post("/v1/embeddings", json={"input": "a"}).status_code == 200
                answered += 1
            assert answered > 1
            (item,) = found[0].json()["data"]
            if form == "float":
                assert [len(vector) for vector in item["data"]] == [1 << 20] * 4
            else:
                assert len(base64.b64decode(item["data"])) == 16 << 20
    finally:
        large.stop()
