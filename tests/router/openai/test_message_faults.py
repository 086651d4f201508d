"""Keys, errors and broken streams of the Messages API, as the anthropic package sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests import clear_text
from tests.router.fake_worker import FakeWorker
from tests.router.http_server import Served
from tests.router.openai.test_messages import ASK, client_of
from tests.waiting import wait_for

from tandem.protocol.errors import FailCause

Make = Callable[..., FakeWorker]
Serve = Callable[..., Served]


@pytest.mark.full
def test_keys_are_taken_in_either_header(serve: Serve, decode: Make) -> None:
    """x-api-key or Bearer, on every path; a wrong one is 401 in Anthropic's shape."""
    import anthropic  # takes seconds: not while tests are collected

    served = serve(decode(), api_key=("right",), wait=False)
    served.wait_started()
    wait_for(lambda: clear_text.get(served.url + "/ready").status_code == 200)
    for headers in ({"x-api-key": "right"}, {"Authorization": "Bearer right"}):
        for path in ("/v1/messages", "/v1/chat/completions"):
            assert served.post(path, json=ASK, headers=headers).status_code == 200
    for headers in ({"x-api-key": "wrong"}, {"Authorization": "Basic right"}, {}):
        answer = served.post("/v1/messages", json=ASK, headers=headers)
        assert (answer.status_code, answer.json()["type"]) == (401, "error")
    with client_of(served, api_key="right") as client:
        assert client.messages.create(**ASK).content
    with client_of(served, auth_token="right", api_key=None) as client:
        assert client.messages.create(**ASK).content
    with (
        client_of(served, api_key="wrong") as client,
        pytest.raises(anthropic.AuthenticationError) as error,
    ):
        client.messages.create(**ASK)
    body: Any = error.value.body
    assert body["error"]["type"] == "authentication_error"
    assert body["request_id"] == error.value.response.headers["x-request-id"]


def test_errors_have_anthropics_shape(well: Served) -> None:
    """Of wrong bodies, unknown models and too large ones; elsewhere OpenAI's."""
    import anthropic

    with client_of(well) as client:
        with pytest.raises(anthropic.NotFoundError, match="`claude` does not exist"):
            client.messages.create(**{**ASK, "model": "claude"})
        with pytest.raises(anthropic.BadRequestError, match="temperature: 5"):
            client.messages.create(**ASK, extra_body={"temperature": 5.0})
    missing = well.post("/v1/messages", json={"messages": []}).json()
    assert missing["error"]["message"] == "max_tokens: is required"
    other = well.post("/v1/chat/completions", json={}).json()
    assert set(other) == {"error"}


def test_a_stream_that_breaks_off_ends_with_its_error(serve: Serve, decode: Make) -> None:
    import anthropic

    def break_off(turn: Any) -> Any:
        turn.accept()
        yield 0.0
        turn.token(0)
        yield 0.05
        turn.fail(FailCause.INTERNAL)

    served = serve(decode(behaviour=break_off), max_attempts=1)
    with (
        client_of(served) as client,
        pytest.raises(anthropic.APIStatusError) as error,
        client.messages.stream(**ASK) as stream,
    ):
        stream.until_done()
    body: Any = error.value.body
    assert body["error"]["type"] == "overloaded_error"


def test_a_client_that_leaves_stops_the_work(serve: Serve, decode: Make) -> None:
    worker = decode(step=0.05)
    served = serve(worker)
    with client_of(served) as client, client.messages.create(**ASK, stream=True) as stream:
        assert next(iter(stream)).type == "message_start"
    wait_for(lambda: worker.cancelled)


def test_messages_and_tools_are_bounded(serve: Serve, decode: Make) -> None:
    """As those of a chat are; the body as a whole is, too."""
    served = serve(decode(), max_messages=2, max_body_bytes=100_000)
    tool = {"name": "f", "input_schema": {"type": "object"}}
    wrong: list[tuple[dict[str, Any], int, str]] = [
        ({"messages": ASK["messages"] * 3}, 400, "messages: "),
        ({"tools": [tool] * 1_025}, 400, "tools: "),
        ({"stop_sequences": ["x"] * 1_025}, 400, "stop_sequences: "),
    ]
    for extra, status, begin in wrong:
        answer = served.post("/v1/messages", json={**ASK, **extra})
        assert answer.status_code == status, answer.text
        assert answer.json()["error"]["message"].startswith(begin)
    kind = "request_too_large"
    assert served.post("/v1/messages", content=b"x" * 100_001).json()["error"]["type"] == kind
