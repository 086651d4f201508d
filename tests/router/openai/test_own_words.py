"""What a client says for itself: its id, its priority, its trace; and what its words cost."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from tests.router.fake_worker import FakeWorker, Turn
from tests.router.http_server import ANSWER, Served
from tests.waiting import wait_for

from tandem.protocol.errors import FailCause, InvalidParameter, Refusal, RefusalCode
from tandem.router.workers.rates import Naps

Make = Callable[..., FakeWorker]
Serve = Callable[..., Served]
BODY: Any = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}]}
CHAT = "/v1/chat/completions"


def test_calls_with_one_request_id_run_side_by_side(serve: Serve, decode: Make) -> None:
    """The id is the client's; each answer carries it, and no call hinders another."""
    d = decode(step=0.02)
    served = serve(d)
    headers = {"X-Request-Id": "the-same"}
    with ThreadPoolExecutor(4) as threads:
        calls = [threads.submit(served.post, CHAT, json=BODY, headers=headers) for _ in range(4)]
    answers = [call.result() for call in calls]

    assert [answer.status_code for answer in answers] == [200] * 4
    assert {answer.headers["x-request-id"] for answer in answers} == {"the-same"}
    assert {answer.json()["choices"][0]["message"]["content"] for answer in answers} == {ANSWER}
    assert len({request.key.request for request in d.submitted}) == 4


def test_errors_carry_the_clients_id(serve: Serve, decode: Make) -> None:
    """Also those that come before anything of the body was understood."""
    served = serve(decode())
    answer = served.post(CHAT, content=b"{", headers={"X-Request-Id": "mine"})
    assert (answer.status_code, answer.headers["x-request-id"]) == (400, "mine")


@pytest.mark.parametrize("value", [2**70, -(2**70), 2**63, 2**31])
def test_a_priority_has_bounds(serve: Serve, decode: Make, value: int) -> None:
    """400 that names the field, where priorities are allowed and where they are not."""
    d = decode()
    for allowed in (True, False):
        served = serve(d, allow_request_priority=allowed)
        error = served.post(CHAT, json={**BODY, "priority": value})
        assert error.status_code == 400
        assert error.json()["error"]["param"] == "priority"
    assert not d.submitted


def test_a_priority_counts_where_it_is_allowed(serve: Serve, decode: Make) -> None:
    d = decode()
    assert (
        serve(d, allow_request_priority=True).post(CHAT, json={**BODY, "priority": -3}).is_success
    )
    assert serve(d).post(CHAT, json={**BODY, "priority": 0}).is_success
    assert [request.priority for request in d.submitted] == [-3, 0]


@pytest.mark.parametrize(
    "value",
    ["x" * 30_000_000, list(range(3_000_000)), {"a": ["b" * 10_000_000] * 3}, 10**6000],
    ids=["text", "list", "nested", "number"],
)
def test_a_message_shows_little_of_a_large_value(value: object) -> None:
    message = str(InvalidParameter("field", value, "less"))
    assert len(message) < 160
    assert message.startswith("field: ")


def test_short_values_are_shown_as_they_are() -> None:
    """Nothing is lost of what fits."""
    for value in ("hot", ["a", 1.5, None, {"b": (1,)}], -7, {"k": "v"}, b"x", True):
        assert f"field: {value!r} is not" in str(InvalidParameter("field", value, "less"))


async def test_a_nap_says_how_much_too_long_it_was() -> None:
    naps = Naps(asyncio.get_running_loop(), 0.0)
    nap = asyncio.create_task(naps.sleep())
    await asyncio.sleep(0)
    time.sleep(0.05)  # noqa: ASYNC251  (what this is about)
    assert await nap >= 0.05


@pytest.mark.full
def test_a_loop_that_stood_still_loses_no_worker(serve: Serve, decode: Make) -> None:
    """Longer than a worker may be silent; a stream that runs beside goes on as if nothing was."""
    d = decode(step=0.05)
    served = serve(d, beat_timeout=0.5)
    loop = served.app.state.router.pool._ticker.get_loop()
    text = ""
    with httpx.stream("POST", served.url + CHAT, json={**BODY, "stream": True}) as stream:
        lines = stream.iter_lines()
        next(lines)
        loop.call_soon_threadsafe(time.sleep, 1.5)
        text = "".join(lines)

    assert "[DONE]" in text
    assert "error" not in text
    assert len(d.submitted) == 1
    wait_for(lambda: served.get("/debug/fleet")["workers"])
    assert d.num_greeted == 1


INTERNAL_WORDS = ("block", "quota", "lease", "hand-off", "127.0.0.1", "decode", "prefill")
SAYINGS = "7 blocks; hand-offs may hold 5 here in all"


def no(code: RefusalCode) -> Callable[[Turn], Iterator[float]]:
    """A worker that refuses in its own words."""

    def behaviour(turn: Turn) -> Iterator[float]:
        turn.refuse(Refusal(code=code, message=SAYINGS, param="prompt_token_ids"))
        yield from ()

    return behaviour


@pytest.mark.parametrize("code", [each for each in RefusalCode if each != RefusalCode.INVALID])
def test_clients_hear_nothing_of_the_fleets_insides(
    serve: Serve, decode: Make, code: RefusalCode
) -> None:
    """Neither of blocks and quotas nor of workers and their addresses."""
    served = serve(decode(behaviour=no(code)))
    error = served.post(CHAT, json=BODY).json()["error"]
    assert not [word for word in INTERNAL_WORDS if word in error["message"].lower()]
    assert error["param"] in (None, "prompt")


@pytest.mark.parametrize("cause", list(FailCause))
def test_nor_of_how_its_workers_failed(serve: Serve, decode: Make, cause: FailCause) -> None:
    """The cause is the error's code; the rest is in the log."""

    def fails(turn: Turn) -> Iterator[float]:
        turn.accept()
        turn.fail(cause)
        yield from ()

    served = serve(decode(behaviour=fails), worker_wait=0.0)
    error = served.post(CHAT, json=BODY).json()["error"]
    assert not [word for word in INTERNAL_WORDS if word in error["message"].lower()]
    assert error["code"]


WIDE = [2**31, 2**63, 2**64, 2**70, -(2**31) - 1, -(2**63) - 1, -(2**70), 10**400]


@pytest.mark.full
@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/tokenize", "/detokenize"])
def test_no_number_is_too_large_to_be_refused(serve: Serve, decode: Make, path: str) -> None:
    """Every field of whole numbers, alone or in a list: an answer or a 4xx, never a 5xx."""
    served = serve(decode(), allow_request_priority=True)
    own = {CHAT: BODY, "/v1/completions": {"prompt": "a"}, "/tokenize": {"prompt": "a"}}
    fields = ["n", "top_k", "seed", "max_tokens", "min_tokens", "priority", "logprobs"]
    fields += ["truncate_prompt_tokens", "prompt_logprobs", "max_completion_tokens", "tokens"]
    fields += ["stop_token_ids", "allowed_token_ids", "prompt", "top_logprobs", "temperature"]
    bodies = [
        json.dumps({**own.get(path, {}), field: given})
        for field in fields
        for value in WIDE
        for given in (value, [1, [value]])
    ]
    with httpx.Client(base_url=served.url) as client:
        for body in bodies:
            answer = client.post(path, content=body)
            assert answer.status_code < 500, (body[:99], answer.text)
