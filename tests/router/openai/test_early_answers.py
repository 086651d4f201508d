"""Streams begin when their request waits, and what goes wrong later is an event of their API."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tests import clear_text
from tests.router.behaviours import behind
from tests.router.fake_worker import FakeWorker, Turn, serve_well
from tests.router.http_server import ANSWER, Served
from tests.waiting import wait_for

from tandem.protocol.errors import FailCause, Refusal, RefusalCode

Make = Callable[..., FakeWorker]
KEEP_ALIVE = ": keep-alive"
MESSAGES: Any = [{"role": "user", "content": "Hi"}]
CALLS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 200},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 200},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 200},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 200},
}
OPENINGS = {
    "/v1/chat/completions": ['"role":"assistant"'],
    "/v1/completions": [KEEP_ALIVE],
    "/v1/responses": ["event: response.created", "event: response.in_progress"],
    "/v1/messages": ["event: message_start", "event: ping"],
}
ERRORS = {
    "/v1/chat/completions": '"error":{',
    "/v1/completions": '"error":{',
    "/v1/responses": "event: response.failed",
    "/v1/messages": "event: error",
}


class Gate:
    """Workers that take requests and say nothing until it opens."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.behaviour = behind(lambda turn: self.opened.is_set())


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.opened.set()


@pytest.fixture
def serve(small_model: Path) -> Iterator[Callable[..., Served]]:
    """Serve with workers and settings; all is stopped at the end."""
    apps: list[Served] = []

    def start(*workers: FakeWorker, **settings: Any) -> Served:
        apps.append(Served(str(small_model), workers, **{"sse_keep_alive": 0.05, **settings}))
        return apps[-1]

    yield start
    for app in apps:
        app.stop()


class Stream:
    """A stream that is read event by event."""

    def __init__(self, served: Served, path: str, **body: Any) -> None:
        self._client = httpx.Client(verify=clear_text.NO_TLS, timeout=60)
        content = {"model": "fake", "stream": True, **CALLS[path], **body}
        self._stack = self._client.stream("POST", served.url + path, json=content)
        self.answer = self._stack.__enter__()
        self._parts = self.answer.iter_text()
        self._text = ""

    def event(self) -> str:
        """The next event or comment; empty at the end."""
        while "\n\n" not in self._text:
            part = next(self._parts, None)
            if part is None:
                return ""
            self._text += part
        event, _, self._text = self._text.partition("\n\n")
        return event

    def rest(self) -> list[str]:
        """All that is left, but for comments."""
        found = []
        while event := self.event():
            found += [] if event == KEEP_ALIVE else [event]
        return found

    def close(self) -> None:
        self._stack.__exit__(None, None, None)
        self._client.close()


@pytest.mark.parametrize("path", CALLS)
def test_a_stream_begins_before_its_first_token_and_is_kept_alive(
    serve: Callable[..., Served], decode: Make, gate: Gate, path: str
) -> None:
    """Headers and the API's first events at once, comments until the first token comes."""
    served = serve(decode(behaviour=gate.behaviour))

    stream = Stream(served, path)

    assert stream.answer.status_code == 200
    for opening in OPENINGS[path]:
        assert opening in stream.event()
    assert [stream.event() for _ in range(3)] == [KEEP_ALIVE] * 3
    gate.opened.set()
    rest = "\n".join(stream.rest())
    assert "Paris" in "".join(_texts(rest))
    assert not any(opening in rest for opening in OPENINGS[path]), "they come once"
    stream.close()


def _texts(stream: str) -> Iterator[str]:
    for line in stream.splitlines():
        if not line.startswith("data: {"):
            continue
        event = json.loads(line[6:])
        for choice in event.get("choices", ()):
            yield choice.get("text") or choice.get("delta", {}).get("content") or ""
        delta = event.get("delta", "")
        yield delta if isinstance(delta, str) else delta.get("text", "")


@pytest.mark.full
@pytest.mark.parametrize("path", CALLS)
def test_a_queued_stream_begins_and_too_long_a_wait_is_an_event(
    serve: Callable[..., Served], decode: Make, gate: Gate, path: str
) -> None:
    """The router's own queue: it begins while it waits; its age is no status any more."""
    served = serve(decode(behaviour=gate.behaviour), max_inflight_requests=1, max_queue_age=1.0)
    first = Stream(served, path)

    queued = Stream(served, path)

    assert queued.answer.status_code == 200
    assert OPENINGS[path][0] in queued.event()
    rest = queued.rest()
    assert any(ERRORS[path] in event for event in rest), rest
    assert any("no turn within" in event for event in rest)
    gate.opened.set()
    assert first.rest()
    first.close()
    queued.close()


@pytest.mark.parametrize("path", CALLS)
def test_a_full_queue_is_429_for_streams_too(
    serve: Callable[..., Served], decode: Make, gate: Gate, path: str
) -> None:
    """What is known before a stream begins keeps its status and headers."""
    served = serve(decode(behaviour=gate.behaviour), max_inflight_requests=1, max_queued_requests=0)
    first = Stream(served, path)

    refused = Stream(served, path)

    assert refused.answer.status_code == 429
    assert refused.answer.headers["Retry-After"]
    refused.close()
    first.close()


@pytest.mark.parametrize("path", CALLS)
def test_a_workers_refusal_keeps_its_status(
    serve: Callable[..., Served], decode: Make, path: str
) -> None:
    """No worker has taken the request yet."""

    def refuse(turn: Turn) -> Iterator[float]:
        turn.refuse(Refusal(code=RefusalCode.CAPACITY, message="full"))
        yield 0.0

    served = serve(decode(behaviour=refuse))

    stream = Stream(served, path)

    assert stream.answer.status_code == 503
    stream.close()


@pytest.mark.parametrize("path", CALLS)
def test_a_failure_after_the_beginning_is_the_apis_error_event(
    serve: Callable[..., Served], decode: Make, path: str
) -> None:

    def fail(turn: Turn) -> Iterator[float]:
        turn.accept()
        yield 0.2
        turn.fail(FailCause.INTERNAL)

    served = serve(decode(behaviour=fail), max_attempts=1)

    stream = Stream(served, path)

    assert stream.answer.status_code == 200
    assert OPENINGS[path][0] in stream.event()
    assert any(ERRORS[path] in event for event in stream.rest())
    stream.close()


@pytest.mark.parametrize("path", CALLS)
def test_bad_input_keeps_its_status(serve: Callable[..., Served], decode: Make, path: str) -> None:
    """It is found before anything waits."""
    stream = Stream(serve(decode()), path, temperature=-5)

    assert stream.answer.status_code == 400
    stream.close()


@pytest.mark.parametrize("path", CALLS)
def test_a_client_that_leaves_while_it_waits_is_let_go_of(
    serve: Callable[..., Served], decode: Make, gate: Gate, path: str
) -> None:
    """In the queue and at a worker: comments hide no client that has gone."""
    worker = decode(behaviour=gate.behaviour)
    served = serve(worker, max_inflight_requests=1)
    admission = served.app.state.router.dispatcher.admission
    running, queued = Stream(served, path), Stream(served, path)
    wait_for(lambda: (admission.num_running, admission.num_waiting) == (1, 1))

    queued.close()
    wait_for(lambda: admission.num_waiting == 0)
    running.close()
    wait_for(lambda: admission.num_running == 0)
    wait_for(lambda: len(worker.cancelled) == 1)


@pytest.mark.parametrize("path", CALLS)
def test_without_keep_alives_a_stream_begins_with_its_first_token(
    serve: Callable[..., Served], decode: Make, path: str
) -> None:
    """A failure before it keeps its status then."""

    def fail(turn: Turn) -> Iterator[float]:
        turn.accept()
        yield 0.2
        turn.fail(FailCause.INTERNAL)

    served = serve(decode(behaviour=fail), max_attempts=1, sse_keep_alive=0.0)

    stream = Stream(served, path)

    assert stream.answer.status_code >= 500
    stream.close()


def test_a_worker_that_does_not_answer_holds_no_headers_back(
    serve: Callable[..., Served], decode: Make, gate: Gate
) -> None:
    """After a second without a refusal the request counts as taken."""

    def silent(turn: Turn) -> Iterator[float]:
        while not gate.opened.is_set():
            yield 0.01
        yield from serve_well(turn)

    stream = Stream(serve(decode(behaviour=silent)), "/v1/chat/completions")

    assert '"role":"assistant"' in stream.event()
    gate.opened.set()
    assert stream.rest()[-1] == "data: [DONE]"
    stream.close()


def test_prompts_of_one_call_begin_its_stream_together(
    serve: Callable[..., Served], decode: Make, gate: Gate
) -> None:
    """The first that waits opens it."""
    served = serve(decode(behaviour=gate.behaviour), max_parallel_prompts=1)

    stream = Stream(served, "/v1/completions", prompt=["a", "b", "c"])

    assert stream.event() == KEEP_ALIVE
    gate.opened.set()
    assert "".join(_texts("\n".join(stream.rest()))) == ANSWER * 3
    stream.close()


@pytest.mark.full
def test_clients_read_a_stream_that_waits(
    serve: Callable[..., Served], decode: Make, gate: Gate
) -> None:
    """The packages of OpenAI and Anthropic skip comments wherever they stand."""
    import anthropic  # takes seconds: not while tests are collected

    served = serve(decode(behaviour=gate.behaviour))
    timer = threading.Timer(0.5, gate.opened.set)
    timer.start()
    with served.client() as client:
        chat = client.chat.completions.create(model="fake", messages=MESSAGES, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chat)
    assert text == ANSWER
    timer.join()
    gate.opened.clear()
    threading.Timer(0.5, gate.opened.set).start()
    web = openai.DefaultHttpxClient(verify=clear_text.NO_TLS)
    with (
        anthropic.Anthropic(base_url=served.url, api_key="none", http_client=web) as client_a,
        client_a.messages.stream(model="fake", messages=MESSAGES, max_tokens=200) as messages,
    ):
        assert messages.get_final_text() == ANSWER
    gate.opened.clear()
    threading.Timer(0.5, gate.opened.set).start()
    with served.client() as client:
        events = list(client.responses.create(model="fake", input="Hi", stream=True))
    assert events[0].type == "response.created"
    assert events[-1].type == "response.completed"
