"""What live views are told of workers, links, queues and rates."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests import clear_text
from tests.router.builders import inc
from tests.router.fake_worker import FakeWorker, Turn
from tests.router.http_server import Served
from tests.waiting import wait_for

from tandem.protocol.errors import FailCause
from tandem.protocol.messages import LoadReport
from tandem.router.dispatch.admission import AdmissionLimits, AdmissionQueue
from tandem.router.dispatch.retry_policy import AttemptFailure
from tandem.router.metrics import RouterMetrics
from tandem.router.observe.fleet_view import MAX_SERIES
from tandem.router.observe.gauges import RouterRates
from tandem.router.observe.timeline.recorder import Ring
from tandem.router.tenant import NO_KEYS
from tandem.router.workers.rates import MAX_SAMPLES, DecayedRate, Window
from tandem.tracing.recording import Recording

Make = Callable[..., FakeWorker]
Serve = Callable[..., Served]
BODY: Any = {"model": "fake", "prompt": "word " * 60, "max_tokens": 4}


def test_a_window_gives_differences_over_seconds() -> None:
    """Samples are bounded in number and age; without two there is no rate."""
    window = Window(5.0)
    assert (window.rates(), window.differences()) == ((), (0.0, ()))
    window.note(100.0, 10, 0)
    assert window.rates() == ()
    window.note(100.01, 99, 0)  # too soon
    for second in range(1, 30):
        window.note(100.0 + second, 10 + 20 * second, 0)
    seconds, _ = window.differences()
    assert 5.0 <= seconds <= 6.0
    assert window.rates() == (20.0, 0.0)
    for beat in range(1000):
        window.note(200.0 + beat / 10, 0, 0)
    assert len(window._samples) <= MAX_SAMPLES
    assert window.rates() == (0.0, 0.0)


def test_a_decayed_rate_forgets() -> None:
    """Near what came lately while it comes, and near nothing long after."""
    rate = DecayedRate(5.0)
    for tenth in range(400):
        rate.note(1, tenth / 10)
    assert rate.read(40.0) == pytest.approx(10.0, rel=0.05)
    assert rate.read(100.0) < 0.001


def test_rates_of_the_router_are_of_its_counters() -> None:
    """Over the window; means of what there was, None where there was nothing."""
    metrics = RouterMetrics("m")
    rates = RouterRates(metrics)
    assert rates.to_json() == {"window_s": 0.0}
    rates.sample(10.0)
    assert rates.to_json() == {"window_s": 0.0}
    for _ in range(4):
        metrics.request_started(num_prompt=50, num_choices=1, max_tokens=None)
        metrics.first_token(0.25)
        metrics.next_token(0.01)
        metrics.request_ended(seconds=1.0, num_tokens=2, num_choices=1, decode_seconds=0.01)
    metrics.cached_tokens(100)
    metrics.request_failed("timeout")
    metrics.rejected("max_queue_age")
    rates.sample(12.0)
    assert rates.to_json() == {
        "window_s": 2.0,
        "requests_per_s": 2.0,
        "ended_per_s": 2.0,
        "failed_per_s": 0.5,
        "prompt_tokens_per_s": 100.0,
        "outputs_per_s": 4.0,
        "cached_share": 0.5,
        "ttft_ms": 250.0,
        "itl_ms": 10.0,
    }
    assert metrics.rejections() == {"max_queue_age": 1}


async def test_the_queue_knows_how_long_its_oldest_waits() -> None:
    limits = AdmissionLimits(
        max_inflight_requests=1,
        max_inflight_tokens=100,
        max_queued_requests=5,
        max_queued_tokens=100,
        max_queue_age=5.0,
    )
    queue, loop = AdmissionQueue(limits, RouterMetrics()), asyncio.get_running_loop()
    await queue.enter(1)
    assert queue.oldest_wait(loop.time()) == 0
    waiting = asyncio.create_task(queue.enter(1))
    await asyncio.sleep(0)
    assert 2.9 < queue.oldest_wait(loop.time() + 3) < 3.5
    queue.leave(1)
    await waiting
    assert queue.oldest_wait(loop.time()) == 0


def load(step: int) -> LoadReport:
    return LoadReport(
        num_running=3,
        num_waiting=2,
        waiting_tokens=500,
        free_blocks=250,
        total_blocks=1000,
        computed_tokens=100 * step,
        generated_tokens=7 * step,
    )


def test_links_of_pulls_say_how_fast_they_are(serve: Serve, decode: Make) -> None:
    """By what came over them, or by their probes while nothing did."""
    one, two = decode(pull_peers=1), decode(pull_peers=1)
    one.probed_bytes_per_s = 5e7
    two.probed_bytes_per_s, two.bytes_per_s = 4e7, 2e9
    served = serve(one, two)
    wait_for(lambda: len(served.get("/debug/fleet")["pull_links"]) == 2)
    links = served.get("/debug/fleet")["pull_links"]
    assert {each["puller"]: each["bytes_per_s"] for each in links} == {
        one.incarnation.hex(): 50_000_000,
        two.incarnation.hex(): 2_000_000_000,
    }


def test_the_fabric_is_the_links_alone(serve: Serve, prefill: Make, decode: Make) -> None:
    """Each link as in the whole view: its transport, how fast it is, its state, and why."""
    p, d = prefill(), decode()
    d.bytes_per_s, d.probed_bytes_per_s = 3e9, 5e8
    served = serve(p, d, strict_handoff=True)
    fabric = served.get("/debug/fabric")
    assert set(fabric) == {
        *("transport", "handoff_links", "handoff_links_left_out", "pull_links", "quarantined"),
    }
    (link,) = fabric["handoff_links"]
    assert (link["transport"], link["gb_per_s"], link["state"]) == ("tcp", 3.0, "up")
    assert link["probed_gb_per_s"] == 0.5
    fleet = served.get("/debug/fleet")
    assert {name: fleet[name] for name in fabric if name != "handoff_links"} == {
        name: fabric[name] for name in fabric if name != "handoff_links"
    }
    assert [each.keys() for each in fleet["handoff_links"]] == [link.keys()]
    names = {each["incarnation"]: each["name"] for each in fleet["workers"]}
    assert names == {link[end]: link[f"{end}_name"] for end in ("prefill", "decode")}


def test_workers_and_links_are_told_whole(serve: Serve, prefill: Make, decode: Make) -> None:
    """Health, load and rates of each worker; transport, pace and hand-offs of each link."""
    p, d = prefill(), decode()
    d.bytes_per_s, d.waiting_bytes = 2e9, 77
    served = serve(p, d, strict_handoff=True)
    for _ in range(3):
        assert served.post("/v1/completions", json=BODY).is_success
    for step in range(1, 12):
        d.load = load(step)
        time.sleep(0.1)

    fleet = served.get("/debug/fleet")
    assert len(fleet["workers"]) == 2
    (worker,) = [each for each in fleet["workers"] if each["role"] == "decode"]
    assert (worker["health"], worker["running"], worker["waiting"]) == ("up", 3, 2)
    assert worker["kv_use"] == 0.75
    assert worker["generated_tokens_per_s"] > 0
    assert worker["prompt_tokens_per_s"] == pytest.approx(
        worker["generated_tokens_per_s"] * 100 / 7, rel=0.01
    )
    assert worker["heard_ms_ago"] < 1000
    (link,) = fleet["handoff_links"]
    assert (link["prefill"], link["decode"]) == (p.incarnation.hex(), d.incarnation.hex())
    assert (link["state"], link["transport"], link["gb_per_s"]) == ("up", "tcp", 2.0)
    assert (link["waiting_bytes"], link["underway"]) == (77, 0)
    assert (link["handoffs"], link["failed"]) == (3, 0)
    assert link["handoffs_per_s"] > 0
    assert link["tokens_per_s"] > link["handoffs_per_s"]
    assert fleet["rates"]["window_s"] >= 0
    assert fleet["queue"]["waiting"] == 0
    ends = f'decode="{d.endpoint}",prefill="{p.endpoint}"'
    series = "tandem:router_handoff_link"
    told = served.metrics()
    assert f'{series}_info{{{ends},state="up",transport="tcp"}} 1.0' in told
    assert f'{series}_bytes_per_second{{{ends},transport="tcp"}} 2e+09' in told
    assert f'{series}_waiting_bytes{{{ends},transport="tcp"}} 77.0' in told
    assert f"{series}s_not_shown 0.0" in told

    known, pair = served.app.state.fleet, (p.incarnation, d.incarnation)
    for cause in (FailCause.TIMEOUT, FailCause.WORKER_LOST):
        failure = AttemptFailure(
            worker=p.incarnation, worker_name="p", pair=pair, message="", cause=cause
        )
        known.blame(failure, time.monotonic())
    assert served.get("/debug/fleet")["handoff_links"][0]["failed"] == 1
    for _ in range(3):
        known.links.failed(pair, FailCause.TIMEOUT, time.monotonic())
    assert served.get("/debug/fleet")["handoff_links"][0]["state"] == "resting"
    known.links.failed(pair, FailCause.DIGEST, time.monotonic())
    link = served.get("/debug/fleet")["handoff_links"][0]
    assert (link["state"], link["reason"]) == ("quarantined", "digest")
    told = served.metrics()
    assert f'{series}_info{{{ends},state="quarantined",transport="tcp"}} 1.0' in told
    assert f'{series}s{{state="quarantined"}} 1.0' in told
    known.handed_over((inc(1), inc(2)), 5)
    assert set(known.handoffs) == {pair}, "nobody keeps counts of workers that are gone"
    p.stop()
    wait_for(lambda: len(served.get("/debug/fleet")["workers"]) == 1)
    assert served.get("/debug/fleet")["quarantined"] == []
    assert f'{series}s{{state="quarantined"}} 0.0' in served.metrics()


def test_what_waits_is_told_by_what_for(serve: Serve, decode: Make) -> None:
    """One at a worker, the others in the router's queue; the bounds are told, too. All in one
    answer, which comes when the worker was heard to have taken the one."""
    go = threading.Event()

    def holding(turn: Turn) -> Iterator[float]:
        turn.accept()
        while not go.is_set():
            yield 0.005
        for position in range(BODY["max_tokens"]):
            turn.token(position)
            yield 0.0

    served = serve(decode(behaviour=holding), max_inflight_requests=1, request_timeout=60.0)

    def settled() -> Any:
        told = served.get("/debug/fleet")
        waits = told["underway"]
        return told if (waits["admission"], waits["prefill"]) == (2, 1) else None

    with ThreadPoolExecutor(3) as threads:
        calls = [threads.submit(served.post, "/v1/completions", json=BODY) for _ in range(3)]
        queue = wait_for(settled)["queue"]
        assert (queue["running"], queue["waiting"], queue["max_running"]) == (1, 2, 1)
        assert queue["waiting_tokens"] == 2 * queue["running_tokens"]
        wait_for(lambda: served.get("/debug/fleet")["queue"]["oldest_wait_s"] > 0.05)
        listed = served.get("/debug/requests")["requests"]
        assert [each["running"] for each in listed] == [True] * 3
        go.set()
        assert [call.result().status_code for call in calls] == [200] * 3


def test_the_last_calls_are_listed(serve: Serve, decode: Make) -> None:
    """The latest first, as many as asked for; a wrong number is refused by name."""
    served = serve(decode())
    ids = [served.post("/v1/completions", json=BODY).json()["id"] for _ in range(3)]
    answer = served.get("/debug/requests?limit=2")
    assert answer["kept"] == 3
    assert [f"cmpl-{each['request_id']}" for each in answer["requests"]] == [ids[2], ids[1]]
    first = answer["requests"][0]
    assert sum(part[3] for part in first["parts"]) == pytest.approx(first["total_ms"], abs=1.0)
    for wrong in ("limit=0", "limit=101", "limit=x", "limit=-1", "limit=٣", "other=1"):
        refused = clear_text.get(f"{served.url}/debug/requests?{wrong}")
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == wrong.partition("=")[0]


def test_no_more_calls_are_listed_than_asked_for() -> None:
    ring = Ring(10, 1 << 20)
    calls = [Recording(f"{number}", 0.0) for number in range(6)]
    for each in calls:
        ring.open(each)
    for each in calls[:4]:
        ring.close(each)
    assert [each.request_id for each in ring.latest(3, NO_KEYS)] == ["5", "4", "3"]
    assert len(ring.latest(100, NO_KEYS)) == 6


def test_live_views_ask_for_the_key(serve: Serve, decode: Make) -> None:
    """All that tells of workers or calls."""
    served = serve(decode(), wait=False, api_key=("k",))
    served.wait_started()
    for path in ("/debug/fleet", "/debug/requests", "/debug/placements"):
        assert clear_text.get(served.url + path).status_code == 401
        key = {"Authorization": "Bearer k"}
        assert clear_text.get(served.url + path, headers=key).status_code == 200


def test_series_of_links_are_bounded(serve: Serve, prefill: Make, decode: Make) -> None:
    """Of a thousand links those that do not work are told first, and how many are not told."""
    p, d = prefill(), decode()
    served = serve(p, d)
    assert 'state="up"' in served.metrics()
    d.peers = {**d.peers, **{str(number): inc(number) for number in range(1, 1001)}}
    left_out = f"tandem:router_handoff_links_not_shown {1001.0 - MAX_SERIES}"
    wait_for(lambda: left_out in served.metrics(), seen=served.metrics)
    lines = served.metrics().splitlines()
    told = [line for line in lines if line.startswith("tandem:router_handoff_link_info{")]
    assert len(told) == MAX_SERIES
    assert all('state="down"' in line for line in told), "the one that works can wait"
