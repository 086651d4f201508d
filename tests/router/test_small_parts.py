"""Settings, error answers, metrics, chunks: parts that need no socket."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from starlette.types import Message
from tests.router.builders import inc, make_request

from tandem.protocol.errors import (
    FailCause,
    InvalidParameter,
    Refusal,
    RefusalCode,
    RequestFailed,
    RequestRefused,
)
from tandem.protocol.finish import FinishReason
from tandem.protocol.hashing import hash_blocks, root_hash
from tandem.protocol.outputs import Accepted
from tandem.protocol.settings import settings_of
from tandem.router.config import RouterConfig, check_endpoint
from tandem.router.dispatch.attempt import Attempt, Leg
from tandem.router.dispatch.failure import DeadlinePassed, FailedClosed
from tandem.router.dispatch.job import Job
from tandem.router.metrics import RouterMetrics
from tandem.router.openai.chunks import chat_writer, completion_writer, usage
from tandem.router.openai.errors import answer_of
from tandem.router.openai.sse import ClientGone, EventStream
from tandem.router.placement.base import Placement


def test_every_setting_explains_itself() -> None:
    """cli/ makes flags of them: each has a default and a help text."""
    settings = list(settings_of(RouterConfig))
    assert [each.name for each in settings] == [f.name for f in dataclasses.fields(RouterConfig)]
    assert all(each.help.endswith(".") and not each.required for each in settings)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("port", -1),
        ("port", 70_000),
        ("port", "80"),
        ("port", True),
        ("max_attempts", 0),
        ("max_body_bytes", 0),
        ("min_handoff_tokens", -1),
        ("ready_prefill", -1),
        ("request_timeout", 0),
        ("request_timeout", float("inf")),
        ("worker_wait", -1.0),
        ("beat_timeout", 0.5),
        ("beat_timeout", "soon"),
        ("workers", ("host",)),
        ("workers", ("host:0",)),
        ("workers", (":80",)),
    ],
)
def test_bad_settings(field: str, value: object) -> None:
    """Name the setting and what is allowed."""
    with pytest.raises(InvalidParameter) as caught:
        RouterConfig(**{field: value})  # type: ignore[arg-type]
    assert caught.value.param == field


def test_endpoints() -> None:
    """Names, IPv4, IPv6 in brackets."""
    for endpoint in ("worker-0.workers:5570", "10.0.0.1:1", "[::1]:5570"):
        assert check_endpoint("workers", endpoint) == endpoint


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (DeadlinePassed(FailCause.TIMEOUT, "m"), 504, "timeout"),
        (FailedClosed(FailCause.IDENTITY, "m"), 500, "failed_closed"),
        (RequestFailed(FailCause.TIMEOUT, "m"), 503, "timeout"),
        (RequestFailed(FailCause.IDENTITY, "m"), 503, "identity"),
        (RequestFailed(FailCause.INTERNAL, "m", ("a", "b")), 503, "internal"),
        (
            RequestRefused(Refusal(code=RefusalCode.DUPLICATE, message="m")),
            503,
            "duplicate",
        ),
        (ValueError("secret"), 500, None),
    ],
)
def test_error_answers(error: Exception, status: int, code: str | None) -> None:
    """Statuses and codes; what happened within the fleet is for the log."""
    answer = answer_of(error)
    body = json.loads(answer.body)["error"]

    assert (answer.status, body["code"]) == (status, code)
    assert "secret" not in body["message"]
    if isinstance(error, RequestFailed) and error.reasons:
        assert "a; b" not in body["message"]
    assert ("Retry-After" in answer.headers) == (status == 503)


def data_of(event: bytes) -> Any:
    """The JSON of one event."""
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    return json.loads(event[6:])


@pytest.mark.parametrize("index", [0, 7, 8, 127])
@pytest.mark.parametrize("says_usage", [False, True])
def test_chunks_are_json(index: int, says_usage: bool) -> None:
    """The prepared parts join to what a plain encoder would have made."""
    text = 'quote " backslash \\ newline \n é 😀 \u2028'
    chat = chat_writer(stream_id='i"d', created=5, model="m", says_usage=says_usage)
    plain = data_of(chat.text(index, text))
    choice = {
        "index": index,
        "delta": {"content": text},
        "logprobs": None,
        "finish_reason": None,
    }
    expected: dict[str, Any] = {
        "id": 'i"d',
        "object": "chat.completion.chunk",
        "created": 5,
        "model": "m",
        "choices": [choice],
    }
    if says_usage:
        expected["usage"] = None
    assert plain == expected

    done = completion_writer(stream_id="i", created=5, model="m", says_usage=says_usage)
    said = usage(1, 2, None)
    full = data_of(
        done.full(
            index,
            text,
            finish=FinishReason.STOP,
            stop_reason=7,
            extras={"token_ids": [1]},
            usage=said,
        )
    )
    assert full["choices"] == [
        {
            "index": index,
            "text": text,
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": 7,
            "token_ids": [1],
        }
    ]
    assert full["usage"] == said
    assert data_of(done.last_usage(said))["choices"] == []
    assert data_of(done.raw(index, b'"text":""'))["choices"][0]["text"] == ""


def test_metrics_of_another_name() -> None:
    """The model's name may become known later; nothing is counted under both."""
    metrics = RouterMetrics()
    metrics.serve("m")
    metrics.serve("m")
    metrics.first_token(0.1)

    assert b'vllm:time_to_first_token_seconds_count{model_name="m"} 1.0' in metrics.text()


def test_hashes_of_the_caller_are_used_if_they_fit() -> None:
    """A chain of the right root is taken as it is; of another, made anew."""
    request = make_request(64)
    root = root_hash(fingerprint="f", block_size=16)
    right = tuple(hash_blocks(root, request.prompt_token_ids, 16))
    given = type(request)(
        key=request.key,
        prompt_token_ids=request.prompt_token_ids,
        params=request.params,
        block_hashes=right,
    )
    job = Job(given, name="1", deadline=1.0, max_attempts=3, metrics=RouterMetrics())

    assert job.hashes("f", 16) is right
    assert job.hashes("f", 16) is right
    assert job.hashes("g", 16) != right
    assert len(job.hashes("g", 16)) == 4
    assert (
        Job(request, name="2", deadline=1.0, max_attempts=3, metrics=RouterMetrics()).hashes(
            "f", 16
        )
        == right
    )
    assert inc(1) != inc(2)


async def test_a_client_that_does_not_read() -> None:
    """Its stream is closed after a while, and so is what feeds it."""

    closed: list[bool] = []

    async def events() -> AsyncGenerator[bytes, None]:
        try:
            while True:
                yield b"data: x\n\n"
        finally:
            closed.append(True)

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError("never")

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    gone: list[bool] = []
    stream = EventStream(events(), seconds=0.02, gone=lambda: gone.append(True))
    await stream({"type": "http"}, receive, send)

    assert closed == [True]
    assert gone == [True]


async def test_an_error_before_the_first_event_decides_the_status() -> None:
    """Nothing is sent, and who called the stream learns of it."""
    sent: list[Message] = []

    async def events() -> AsyncGenerator[bytes, None]:
        raise InvalidParameter("prompt", "", "a text")
        yield b""

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError("never")

    async def send(message: Message) -> None:
        sent.append(message)

    stream = EventStream(events(), seconds=1.0, gone=lambda: None)
    with pytest.raises(InvalidParameter):
        await stream({"type": "http"}, receive, send)
    assert sent == []


async def test_a_client_that_leaves_before_the_first_event_is_told_of_by_an_error() -> None:
    """The work ends at once; whoever gives errors their status counts it, not the stream."""
    ended: list[bool] = []

    async def events() -> AsyncGenerator[bytes, None]:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)
        yield b""

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        raise AssertionError("nobody is there")

    gone: list[bool] = []
    stream = EventStream(events(), seconds=1.0, gone=lambda: gone.append(True))
    with pytest.raises(ClientGone):
        await stream({"type": "http"}, receive, send)
    assert ended == [True]
    assert gone == []


async def test_a_slow_client_is_no_silent_worker() -> None:
    """Events that wait to be read count as said."""
    attempt = Attempt(0, Placement(inc(1), None, ""), asyncio.get_running_loop())
    leg = Leg(attempt, None, is_prefill=False)  # type: ignore[arg-type]  # no worker is needed
    attempt.legs.append(leg)
    late = attempt.started_at + 100

    leg.receive(Accepted("1", 0))
    assert attempt.overdue(late, accept=1.0, progress=1.0) is None
