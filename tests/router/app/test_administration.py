"""What changes a server for everybody asks for keys of its own."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from tests import clear_text
from tests.router.fake_worker import FakeWorker, Turn
from tests.router.http_server import Served
from tests.waiting import wait_for

from tandem.protocol.pooling import ModelPooling
from tandem.router.api.admin.administration import LOGGERS

Make = Callable[..., FakeWorker]
Serve = Callable[..., Served]
HI = [{"role": "user", "content": "Hi"}]


@pytest.mark.full
@pytest.mark.parametrize(
    ("keys", "given", "status"),
    [
        ({}, None, 403),
        ({"enable_admin_api": True}, None, 200),
        ({"api_key": ("c",)}, "c", 403),
        ({"api_key": ("c",)}, None, 403),
        ({"api_key": ("c",), "admin_api_key": ("a",)}, "c", 401),
        ({"api_key": ("c",), "admin_api_key": ("a",)}, "a", 200),
        ({"admin_api_key": ("a",)}, None, 401),
        ({"admin_api_key": ("b", "a")}, "a", 200),
    ],
)
def test_administration_has_keys_of_its_own(
    serve: Serve, decode: Make, keys: dict[str, Any], given: str | None, status: int
) -> None:
    """A client's key opens it nowhere; the document says what is answered."""
    served = serve(decode(), wait=False, **keys)
    wait_for(lambda: clear_text.get(served.url + "/ready").status_code == 200)
    headers = {} if given is None else {"Authorization": f"Bearer {given}"}
    answer = served.post("/reset_prefix_cache", headers=headers)
    assert answer.status_code == status, answer.text
    opener = {"Authorization": f"Bearer {(*keys.get('admin_api_key', ()), 'c')[0]}"}
    document = clear_text.get(served.url + "/openapi.json", headers=opener).json()
    assert str(status) in document["paths"]["/reset_prefix_cache"]["post"]["responses"]
    models = clear_text.get(served.url + "/v1/models", headers=opener)
    assert models.status_code == 200, "an admin's key opens all else"


def silent(turn: Turn) -> Iterator[float]:
    turn.accept()
    turn.token(0)
    yield 60.0


@pytest.mark.parametrize("path", ["/abort_requests", "/log_level", "/server_info"])
def test_the_others_ask_for_the_same_keys(serve: Serve, decode: Make, path: str) -> None:
    """A client's key opens none of them."""
    served = serve(decode(), api_key=("c",), admin_api_key=("a",), wait=False)
    wait_for(lambda: clear_text.get(served.url + "/ready").status_code == 200)
    for key, status in (("c", 401), ("a", 200)):
        headers = {"Authorization": f"Bearer {key}"}
        if path == "/abort_requests":
            answer = served.post(path, headers=headers, json={"request_ids": ["x"]})
        else:
            answer = clear_text.get(served.url + path, headers=headers)
        assert answer.status_code == status, answer.text


@pytest.mark.parametrize("stream", [True, False])
def test_calls_are_aborted_by_their_ids(serve: Serve, decode: Make, stream: bool) -> None:
    """The client is told, the worker stops; other calls go on."""
    worker = decode(behaviour=silent)
    served = serve(worker, enable_admin_api=True)
    body = {"messages": [{"role": "user", "content": "Hi"}], "stream": stream}
    with ThreadPoolExecutor() as threads:
        headers = {"X-Request-Id": "mine"}
        call = threads.submit(served.post, "/v1/chat/completions", json=body, headers=headers)
        wait_for(lambda: worker.submitted)
        none = served.post("/abort_requests", json={"request_ids": ["other", "chatcmpl-other"]})
        one = served.post("/abort_requests", json={"request_ids": ["chatcmpl-mine"]})
        answer = call.result(20)
    assert (none.json(), one.json()) == ({"aborted": 0}, {"aborted": 1})
    wait_for(lambda: worker.cancelled)
    if stream:
        assert answer.text.endswith("data: [DONE]\n\n")
        assert '"code":"aborted"' in answer.text
    else:
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "aborted")
    wrongs: list[dict[str, Any]] = [
        {},
        {"request_ids": []},
        {"request_ids": ["x"] * 1_025},
        {"request_ids": "x"},
    ]
    for wrong in wrongs:
        assert served.post("/abort_requests", json=wrong).status_code == 400


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": HI}),
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/messages", {"messages": HI, "max_tokens": 50}),
    ],
)
def test_a_stream_is_aborted_by_the_id_that_its_events_tell(
    serve: Serve, decode: Make, path: str, body: dict[str, Any]
) -> None:
    """Whatever API it is of; its client is told."""
    worker = decode(behaviour=silent)
    served = serve(worker, enable_admin_api=True)
    with (
        httpx.Client(verify=clear_text.NO_TLS, timeout=20) as client,
        client.stream("POST", served.url + path, json={**body, "stream": True}) as answer,
    ):
        lines = answer.iter_lines()
        first = json.loads(next(line for line in lines if line.startswith("data: "))[6:])
        told = first.get("response") or first.get("message") or first
        aborted = served.post("/abort_requests", json={"request_ids": [told["id"]]})
        assert aborted.json() == {"aborted": 1}
        assert "aborted by an administrator" in "".join(lines)
    wait_for(lambda: worker.cancelled)


@pytest.mark.parametrize(
    ("prefix", "path", "body"),
    [
        ("embd", "/v1/embeddings", {"input": "Hi"}),
        ("pool", "/pooling", {"input": "Hi"}),
        ("classify", "/classify", {"input": "Hi"}),
        ("score", "/score", {"text_1": "a", "text_2": "b"}),
        ("rerank", "/rerank", {"query": "a", "documents": ["b"]}),
    ],
)
def test_what_is_pooled_is_aborted_by_the_id_that_its_answer_would_have(
    serve: Serve, decode: Make, prefix: str, path: str, body: dict[str, Any]
) -> None:
    """It has one before anything is said."""

    def says_nothing(turn: Turn) -> Iterator[float]:
        turn.accept()
        yield 60.0

    pooling = ModelPooling(labels=("relevant",), generates=False)
    worker = decode(behaviour=says_nothing, pooling=pooling)
    served = serve(worker, enable_admin_api=True)
    with ThreadPoolExecutor() as threads:
        headers = {"X-Request-Id": "mine"}
        call = threads.submit(served.post, path, json=body, headers=headers)
        wait_for(lambda: worker.submitted)
        aborted = served.post("/abort_requests", json={"request_ids": [f"{prefix}-mine"]})
        answer = call.result(20)
    assert aborted.json() == {"aborted": 1}
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "aborted")


def test_settings_are_told_without_secrets(serve: Serve, decode: Make) -> None:
    served = serve(decode(), admin_api_key=("secret-of-mine",), wait=False)
    wait_for(lambda: clear_text.get(served.url + "/ready").status_code == 200)
    headers = {"Authorization": "Bearer secret-of-mine"}
    answer = clear_text.get(served.url + "/server_info", headers=headers)
    told = answer.json()
    assert "secret-of-mine" not in answer.text
    assert told["router"]["admin_api_key"] == "1 given"
    assert told["router"]["max_prompts"] == 256
    (card,) = told["workers"].values()
    assert card["role"] == "decode"


def test_the_log_has_another_level(serve: Serve, decode: Make) -> None:
    """Of this process, at once; levels that are none are refused."""
    before = [logging.getLogger(name).level for name in LOGGERS]
    served = serve(decode(), enable_admin_api=True)
    try:
        assert served.post("/log_level", json={"log_level": "error"}).json() == {
            "log_level": "error"
        }
        assert not logging.getLogger("tandem.access").isEnabledFor(logging.WARNING)
        assert clear_text.get(served.url + "/log_level").json() == {"log_level": "error"}
        refused = served.post("/log_level", json={"log_level": "loud"})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "log_level"
    finally:
        for name, level in zip(LOGGERS, before, strict=True):
            logging.getLogger(name).setLevel(level)


def test_the_tokenizer_is_told_where_it_is_allowed(serve: Serve, decode: Make) -> None:
    """Its settings with the chat template; else 404."""
    assert clear_text.get(serve(decode()).url + "/tokenizer_info").status_code == 404
    served = serve(decode(), enable_tokenizer_info_endpoint=True)
    told = clear_text.get(served.url + "/tokenizer_info").json()
    assert told["chat_template"]
    assert told["eos_token"]
