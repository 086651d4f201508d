"""The fleet is put to sleep and woken up over HTTP; requests meanwhile are refused at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
import pytest
from msgspec import structs
from tests import clear_text
from tests.router.behaviours import refuse_with
from tests.router.builders import BUSY
from tests.router.fake_worker import FakeWorker, Turn
from tests.router.http_server import Served
from tests.waiting import wait_for

from tandem.protocol.commands import Command, CommandName, Reply
from tandem.protocol.errors import FailCause, Refusal, RefusalCode

Make = Callable[..., FakeWorker]
Serve = Callable[..., Served]
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}


def chat(served: Served, **more: Any) -> httpx.Response:
    return served.post("/v1/chat/completions", json={**CHAT, **more})


def has_workers(served: Served) -> bool:
    return bool(served.app.state.fleet.pool.workers)


def names(worker: FakeWorker) -> list[tuple[str, dict[str, Any]]]:
    """Commands about sleep that came, and with what."""
    about = (CommandName.SLEEP, CommandName.WAKE_UP)
    return [(str(each.name), each.args) for each in worker.commands if each.name in about]


def test_every_worker_sleeps_and_wakes(serve: Serve, prefill: Make, decode: Make) -> None:
    """P and D with level and mode; requests behind the answer are refused, then served again."""
    p, d = prefill(), decode()
    served = serve(p, d, ready_prefill=1, enable_admin_api=True)
    assert clear_text.get(served.url + "/is_sleeping").json() == {"is_sleeping": False}
    answer = served.post("/sleep?level=2&mode=wait&timeout=5")
    assert answer.status_code == 200, answer.text
    assert answer.json()["workers"] == answer.json()["asleep"] == 2
    for worker in (p, d):
        ((name, args),) = names(worker)
        assert name == "sleep"
        assert (args["level"], args["mode"]) == (2, "wait")
        assert 5 < float(args["timeout_s"]) <= 15

    assert clear_text.get(served.url + "/is_sleeping").json() == {"is_sleeping": True}
    refused = chat(served)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "asleep")
    assert refused.headers["Retry-After"]
    assert "wakes it up" in refused.json()["error"]["message"]
    assert not p.submitted
    assert not d.submitted
    assert served.post("/v1/embeddings", json={"input": "Hi"}).status_code == 503
    ready = clear_text.get(served.url + "/ready")
    assert (ready.status_code, ready.json()["reason"].partition(":")[0]) == (503, "asleep")
    assert clear_text.get(served.url + "/health").status_code == 200
    assert {each["health"] for each in served.get("/debug/fleet")["workers"]} == {"asleep"}
    assert 'tandem:router_workers{role="decode",state="asleep"} 1.0' in served.metrics()

    woken = served.post("/wake_up?tags=weights&tags=kv_cache")
    assert woken.status_code == 200, woken.text
    assert names(p)[-1] == ("wake_up", {"tags": "weights,kv_cache"})
    assert chat(served).status_code == 200


def test_requests_go_to_workers_that_are_awake(serve: Serve, decode: Make) -> None:
    """One of two sleeps, by whoever asked it."""
    awake, asleep = decode(), decode()
    served = serve(awake, asleep, ready_decode=2, enable_admin_api=True)
    asleep.load = structs.replace(asleep.load, sleeping=True)
    wait_for(lambda: "asleep" in {each["health"] for each in served.get("/debug/fleet")["workers"]})
    for _ in range(6):
        assert chat(served).status_code == 200
    assert len(awake.submitted) == 6
    assert not asleep.submitted
    assert clear_text.get(served.url + "/ready").status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_a_worker_that_fell_asleep_unseen_refuses(serve: Serve, decode: Make, stream: bool) -> None:
    """The client is told at once that it sleeps, not that nobody is there."""
    served = serve(decode(behaviour=refuse_with(RefusalCode.ASLEEP)), enable_admin_api=True)
    answer = chat(served, stream=stream)
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "asleep"


def test_a_request_that_a_sleep_ends_says_so(serve: Serve, decode: Make) -> None:
    """Its stream ends with an error of that name; nothing else is tried where all sleep."""

    def falls(turn: Turn) -> Iterator[float]:
        turn.accept()
        turn.token(0)
        worker = turn.worker
        worker.load = structs.replace(worker.load, sleeping=True)
        worker._beat()
        yield 0.01
        turn.fail(FailCause.ASLEEP)

    worker = decode(behaviour=falls)
    served = serve(worker, enable_admin_api=True)
    answer = chat(served, stream=True)
    assert '"code":"asleep"' in answer.text
    assert len(worker.submitted) == 1


def test_of_workers_that_fall_asleep_one_by_one_it_is_said_too(serve: Serve, decode: Make) -> None:
    """The sleep ends a request at one worker, and the next sleeps as well, which its beats have not
    told yet: the client hears of the sleep, not that the server is full."""

    def falls(turn: Turn) -> Iterator[float]:
        if turn.worker is workers[0]:
            turn.accept()
            turn.token(0)
            yield 0.01
            turn.fail(FailCause.ASLEEP)
        else:
            turn.refuse(Refusal(code=RefusalCode.ASLEEP, message="it sleeps"))

    workers = [decode(behaviour=falls), decode(behaviour=falls)]
    served = serve(*workers, ready_decode=2, enable_admin_api=True)
    workers[1].load = BUSY
    wait_for(lambda: any(each["running"] for each in served.get("/debug/fleet")["workers"]))
    answer = chat(served, stream=True)
    assert '"code":"asleep"' in answer.text
    assert [len(each.submitted) for each in workers] == [1, 1]


def test_one_that_stays_awake_keeps_all_awake(serve: Serve, prefill: Make, decode: Make) -> None:
    """The answer names it and its reason; a request behind it is served, though the one that had
    fallen asleep has told so, and says that it is awake with its next beat."""
    p, d = prefill(insomnia="its memory is mapped"), decode(beat_seconds=0.4)
    behind_sleep(d, d._beat)
    served = serve(p, d, ready_prefill=1, enable_admin_api=True)
    answer = served.post("/sleep")
    assert answer.status_code == 503
    assert answer.json()["ok"] is False
    assert "prefill" in answer.json()["message"]
    assert "its memory is mapped" in answer.json()["message"]
    assert names(d)[-1][0] == "wake_up"
    assert chat(served).status_code == 200


def test_one_that_is_lost_over_it_leaves_all_awake(serve: Serve, decode: Make) -> None:
    """Though no reply says so: who lives has said that it sleeps, and is woken again."""
    lost, lives = decode(), decode(beat_seconds=0.4)
    behind_sleep(lives, lives._beat)
    behind_sleep(lost, lambda: setattr(lost, "silent", True))
    served = serve(lost, lives, beat_timeout=1.0, enable_admin_api=True)
    answer = served.post("/sleep")
    assert answer.status_code >= 500
    assert names(lives)[-1][0] == "wake_up"
    assert chat(served).status_code == 200


def behind_sleep(worker: FakeWorker, do: Callable[[], None]) -> None:
    """Have it do this when it has taken the command, before it answers."""
    reply_to = worker._reply_to

    def replies(command: Command) -> Reply:
        reply = reply_to(command)
        if command.name is CommandName.SLEEP:
            do()
        return reply

    worker._reply_to = replies  # type: ignore[method-assign]


def test_a_fleet_of_nobody_does_not_sleep(serve: Serve) -> None:
    served = serve(wait=False, enable_admin_api=True)
    served.wait_started()
    answer = served.post("/sleep")
    assert (answer.status_code, answer.json()["message"]) == (503, "no worker is up")


@pytest.mark.parametrize(
    ("query", "param", "allowed"),
    [
        ("/sleep?level=3", "level", "one of 1, 2"),
        ("/sleep?level=0", "level", "one of 1, 2"),
        ("/sleep?level=one", "level", "one of 1, 2"),
        ("/sleep?mode=keep", "mode", "requests cannot keep"),
        ("/sleep?timeout=601", "timeout", "seconds from 0 to 600"),
        ("/sleep?timeout=nan", "timeout", "seconds from 0 to 600"),
        ("/sleep?deep=1", "deep", "only level, mode, timeout"),
        ("/wake_up?tags=adapters", "tags", "some of weights, kv_cache"),
        ("/wake_up?level=1", "level", "only tags"),
    ],
)
def test_what_cannot_be_asked_is_refused_by_name(
    serve: Serve, decode: Make, query: str, param: str, allowed: str
) -> None:
    """400, and no worker hears of it."""
    worker = decode()
    served = serve(worker, enable_admin_api=True)
    answer = served.post(query)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert allowed in error["message"]
    assert not names(worker)


@pytest.mark.parametrize("path", ["/sleep", "/wake_up", "/is_sleeping"])
def test_it_asks_for_keys_of_administration(serve: Serve, decode: Make, path: str) -> None:
    """A client's key is not enough; without such keys nobody may."""
    keyed = serve(decode(), api_key=("c",), admin_api_key=("a",), wait=False)
    alone = serve(decode(), api_key=("c",), wait=False)
    method = "GET" if path == "/is_sleeping" else "POST"
    for served, key, status in ((keyed, "c", 401), (keyed, "a", 200), (alone, "c", 403)):
        served.wait_started()
        wait_for(partial(has_workers, served))
        headers = {"Authorization": f"Bearer {key}"}
        answer = httpx.request(method, served.url + path, headers=headers, timeout=20)
        assert answer.status_code == status, answer.text


def test_several_may_ask_at_once(serve: Serve, decode: Make) -> None:
    served = serve(decode(), enable_admin_api=True)
    with ThreadPoolExecutor() as threads:
        answers = list(threads.map(lambda _: served.post("/sleep").status_code, range(4)))
    assert answers == [200] * 4
