"""The end of a router: what runs may finish, what cannot is told so, a second signal is final."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from tests import clear_text
from tests.router.fake_worker import FakeWorker, Turn, serve_well
from tests.router.http_server import Served
from tests.waiting import wait_for

Make = Callable[..., FakeWorker]
Serve = Callable[..., Served]
CHAT: Any = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}]}
CHATS = "/v1/chat/completions"


def never_ends(turn: Turn) -> Iterator[float]:
    turn.accept()
    for position in range(3):
        turn.token(position)
        yield 0.005
    while True:
        yield 0.05


def until_it_streams(served: Served) -> None:
    """The router has heard the first token."""
    first = 'vllm:time_to_first_token_seconds_count{model_name="fake"} 1.0'
    wait_for(lambda: first in served.metrics())


def answer_of(served: Served, *, stream: bool) -> httpx.Response:
    """All of an answer; it must end as HTTP ends."""
    return served.post(CHATS, json={**CHAT, "stream": stream})


@pytest.mark.parametrize("stream", [True, False])
def test_what_cannot_finish_is_told(serve: Serve, decode: Make, stream: bool) -> None:
    """A stream by an error event and the end, an answer that has not begun by 503."""
    d = decode(behaviour=never_ends)
    served = serve(d, drain_timeout=0.3)
    with ThreadPoolExecutor() as threads:
        call = threads.submit(answer_of, served, stream=stream)
        wait_for(lambda: d.submitted)
        if stream:
            until_it_streams(served)
        served.stop()
    answer = call.result()

    if stream:
        events = answer.text.strip().split("\n\n")
        assert events[-1] == "data: [DONE]"
        error = json.loads(events[-2].removeprefix("data: "))["error"]
    else:
        assert answer.status_code == 503
        assert "retry-after" in answer.headers
        error = answer.json()["error"]
    assert error["code"] == "shutting_down"
    wait_for(lambda: d.cancelled)


@pytest.mark.parametrize(
    ("path", "body", "last"),
    [
        ("/v1/responses", {"input": "Hi"}, "response.failed"),
        ("/v1/messages", {"messages": CHAT["messages"], "max_tokens": 50}, "error"),
    ],
)
def test_other_apis_have_last_words_of_their_own(
    serve: Serve, decode: Make, path: str, body: dict[str, Any], last: str
) -> None:
    """The event that their clients take for the end."""
    d = decode(behaviour=never_ends)
    served = serve(d, drain_timeout=0.3)
    with ThreadPoolExecutor() as threads:
        call = threads.submit(served.post, path, json={**body, "stream": True})
        until_it_streams(served)
        served.stop()
    name, data = call.result().text.strip().split("\n\n")[-1].split("\n")

    assert name == f"event: {last}"
    assert json.loads(data.removeprefix("data: "))["type"] == last
    assert "The server stops" in data
    wait_for(lambda: d.cancelled)


def test_what_can_finish_does(serve: Serve, decode: Make) -> None:
    """Within the time to drain nothing is cut."""
    go = threading.Event()

    def held(turn: Turn) -> Iterator[float]:
        while not go.is_set():
            yield 0.005
        yield from serve_well(turn)

    d = decode(behaviour=held)
    served = serve(d, drain_timeout=20.0)
    with ThreadPoolExecutor() as threads:
        heard = threads.submit(answer_of, served, stream=True)
        wait_for(lambda: d.submitted)
        served.server.should_exit = True
        wait_for(lambda: not any(each.is_serving() for each in served.server.servers))
        go.set()
        served.stop()

    text = heard.result().text
    assert "[DONE]" in text
    assert "error" not in text
    assert '"finish_reason":"stop"' in text


def test_a_router_that_drains_is_scraped(serve: Serve, decode: Make) -> None:
    """What it counts to its end is seen; requests go elsewhere, and what runs ends well."""
    go, end = threading.Event(), threading.Event()

    def held(turn: Turn) -> Iterator[float]:
        turn.accept()
        for position, gate in enumerate((None, go, end)):
            while gate is not None and not gate.is_set():
                yield 0.005
            turn.token(position)
            yield 0.005

    def gaps() -> float:
        name = 'vllm:inter_token_latency_seconds_count{model_name="fake"} '
        found = [line for line in served.metrics().splitlines() if line.startswith(name)]
        return float(found[0].removeprefix(name)) if found else 0

    d = decode(behaviour=held)
    served = serve(d, drain_timeout=60.0)
    with ThreadPoolExecutor() as threads, httpx.Client(verify=clear_text.NO_TLS) as kept:
        assert kept.get(served.url + "/health").status_code == 200
        asked = {**CHAT, "stream": True, "max_tokens": 3}
        heard = threads.submit(served.post, CHATS, json=asked)
        wait_for(lambda: d.submitted)
        served.server.handle_exit(signal.SIGTERM, None)
        served.server._captured_signals.clear()
        wait_for(lambda: not any(each.is_serving() for each in served.server.servers))
        go.set()
        wait_for(lambda: gaps() == 1)
        for client in (kept, clear_text):
            assert client.get(served.url + "/health").status_code == 200
            assert client.get(served.url + "/ready").status_code == 503
            refused = client.post(served.url + CHATS, json=CHAT)
            assert refused.status_code == 503
            assert refused.headers["connection"] == "close"
            assert "retry-after" in refused.headers
            assert refused.json()["error"]["code"] == "shutting_down"
        assert not heard.done()
        end.set()
        served.stop()

    assert heard.result().text.strip().endswith("data: [DONE]")
    assert '"finish_reason":"length"' in heard.result().text
    assert len(d.submitted) == 1
    with pytest.raises(httpx.ConnectError):
        clear_text.get(served.url + "/health")


def test_a_late_body_is_read_before_it_is_refused(serve: Serve, decode: Make) -> None:
    """A connection that is closed over bytes that nobody read is reset, and its answer is lost."""
    d = decode(behaviour=never_ends)
    served = serve(d, drain_timeout=60.0)
    with ThreadPoolExecutor() as threads:
        heard = threads.submit(answer_of, served, stream=True)
        wait_for(lambda: d.submitted)
        served.server.should_exit = True
        wait_for(lambda: not any(each.is_serving() for each in served.server.servers))
        refused = served.post(CHATS, content=b"x" * (8 << 20))
        served.server.force_exit = True
        served.stop()
        assert heard.exception() is not None or "[DONE]" in heard.result().text
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")


def test_a_request_in_the_queue_is_told(serve: Serve, decode: Make) -> None:
    """It never reached a worker; 503 says that it may be sent again."""
    d = decode(behaviour=never_ends)
    served = serve(d, drain_timeout=0.3, max_inflight_requests=1)
    with ThreadPoolExecutor() as threads:
        first = threads.submit(served.post, CHATS, json=CHAT)
        wait_for(lambda: d.submitted)
        second = threads.submit(served.post, CHATS, json=CHAT)
        wait_for(lambda: served.app.state.router.dispatcher.admission.num_waiting)
        served.stop()

    assert [first.result().status_code, second.result().status_code] == [503, 503]
    assert len(d.submitted) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_at_once(serve: Serve, decode: Make, number: signal.Signals) -> None:
    """However long requests may still take."""
    d = decode(behaviour=never_ends)
    served = serve(d, drain_timeout=60.0)
    with ThreadPoolExecutor() as threads:
        heard = threads.submit(answer_of, served, stream=True)
        wait_for(lambda: d.submitted)
        for _ in range(2):
            served.server.handle_exit(number, None)
        served.server._captured_signals.clear()
        served.stop()
        assert heard.exception() is not None or "[DONE]" in heard.result().text
