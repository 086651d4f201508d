"""How an engine comes to sleep: what it refuses, ends, waits for and forgets."""

from __future__ import annotations

from typing import Any

import pytest
from tests.engine_plan.builders import Harness, params_of, request_of
from tests.engine_plan.handoff import ProducerSide
from tests.engine_plan.pair import produce

from tandem.protocol.commands import Command, CommandName, Reply, SleepTag
from tandem.protocol.errors import FailCause, RefusalCode, TandemError
from tandem.protocol.ids import RequestKey

SLEEP, WAKE_UP = CommandName.SLEEP, CommandName.WAKE_UP


def call(harness: Harness, name: CommandName, **args: Any) -> Reply:
    return harness.core.call(Command(id=3, name=name, args=args))


def test_an_idle_engine_sleeps_at_once_and_refuses() -> None:
    """The prefix cache is gone and routers are told; a request is refused until all is there."""
    harness = Harness()
    request = request_of("a", 40, params=params_of(max_tokens=3))
    harness.add(request)
    harness.run()
    assert harness.core.stats()["cached_blocks"]
    assert harness.stored

    reply = call(harness, SLEEP, level=2)
    assert (reply.ok, reply.values["engines"], reply.values["asleep"]) == (True, 1, 1)
    assert harness.executor.slept == [2]
    assert harness.core.stats()["cached_blocks"] == 0
    harness.step()
    assert not harness.stored
    assert harness.core.load_report().sleeping
    refusal = harness.core.add(request_of("b", 5))
    assert refusal is not None
    assert refusal.code is RefusalCode.ASLEEP

    assert call(harness, WAKE_UP, tags="weights").values["asleep"] == 1
    assert harness.core.add(request_of("b", 5)) is not None, "its KV memory still sleeps"
    assert call(harness, WAKE_UP).values["asleep"] == 0
    assert harness.executor.woken == [SleepTag.WEIGHTS, SleepTag.KV_CACHE]
    again = request_of("c", 40, params=params_of(max_tokens=3))
    harness.add(again)
    harness.run()
    harness.check(again)
    harness.step()
    harness.check_empty()


def test_what_runs_is_aborted() -> None:
    """Its router is told why; the engine sleeps once that is said."""
    harness = Harness()
    harness.add(request_of("a", 40, params=params_of(max_tokens=500, ignore_eos=True)))
    harness.step()
    assert call(harness, SLEEP).values["asleep"] == 0
    assert harness.core.add(request_of("b", 5)) is not None, "nothing new comes between"
    (failed,) = [each for told in harness.step().failed.values() for each in told]
    assert failed.cause is FailCause.ASLEEP
    while harness.core.has_work:
        harness.step()
    assert call(harness, SLEEP).values["asleep"] == 1
    harness.step()
    harness.check_empty()


def test_what_runs_may_come_to_its_end() -> None:
    """With mode wait nothing is ended, and nothing new is taken meanwhile."""
    harness = Harness()
    request = request_of("a", 40, params=params_of(max_tokens=6, ignore_eos=True))
    harness.add(request)
    harness.step()
    assert call(harness, SLEEP, mode="wait").values["asleep"] == 0
    assert harness.core.load_report().sleeping
    refusal = harness.core.add(request_of("b", 5))
    assert refusal is not None
    assert refusal.code is RefusalCode.ASLEEP
    harness.run()
    harness.check(request)
    assert call(harness, SLEEP, mode="wait").values["asleep"] == 1


def test_kv_that_is_promised_is_waited_for() -> None:
    """Blocks of a hand-off stay until the other side has let go of them."""
    side = ProducerSide()
    harness = Harness(connector=side)
    request = produce("a", 40, params=params_of(max_tokens=5))
    harness.add(request)
    while not harness.core.scheduler.held_keys():
        harness.step()
    assert call(harness, SLEEP, mode="wait").values["asleep"] == 0
    assert harness.executor.slept == []
    assert call(harness, SLEEP, mode="abort").values["asleep"] == 0
    assert ("cancelled", request.key) in side.calls
    while harness.core.has_work:
        harness.step()
    assert call(harness, SLEEP).values["asleep"] == 1
    harness.step()
    harness.check_empty()


def test_a_store_that_a_fork_left_behind_is_waited_for() -> None:
    """A choice's copy of a block pushed another out in the step that ended them all: the tier's
    memory, to which that one is to go, is not given back before."""
    harness = Harness(6, num_cpu_blocks=20)
    harness.add(request_of("a", [9] * 90, params=params_of(max_tokens=2, ignore_eos=True)))
    harness.run()
    both = request_of("b", 20, params=params_of(n=2, max_tokens=1, ignore_eos=True))
    harness.add(both)
    while harness.core.holds(both.key):
        harness.step()
    assert call(harness, SLEEP, mode="wait").values["asleep"] == 0
    while harness.core.has_work:
        harness.step()
    assert call(harness, SLEEP, mode="wait").values["asleep"] == 1
    harness.step()
    assert call(harness, WAKE_UP).ok
    harness.check(both)
    harness.check_empty()


def test_a_sleep_that_does_not_come_in_time_is_off() -> None:
    """Whoever asked for it may be gone: requests are taken again, without being told to."""
    harness = Harness()
    harness.add(request_of("a", 40, params=params_of(max_tokens=500, ignore_eos=True)))
    harness.step()
    call(harness, SLEEP, mode="wait", timeout_s=5)
    assert harness.core.add(request_of("b", 5)) is not None
    harness.clock.now += 5.1
    assert harness.core.add(request_of("b", 5)) is None


def test_waking_up_calls_a_sleep_off() -> None:
    harness = Harness()
    request = request_of("a", 40, params=params_of(max_tokens=6, ignore_eos=True))
    harness.add(request)
    harness.step()
    call(harness, SLEEP, mode="wait")
    assert call(harness, WAKE_UP).ok
    assert harness.executor.woken == []
    assert harness.core.add(request_of("b", 5)) is None
    harness.run()
    harness.check(request)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"level": 3}, "level: 3 is not allowed; one of 1, 2"),
        ({"level": 0}, "level: 0 is not allowed"),
        ({"level": True}, "level: True is not allowed"),
        ({"mode": "keep"}, "mode: 'keep' is not allowed; one of abort, wait"),
        ({"timeout_s": 601}, "timeout_s: 601 is not allowed; seconds from 0 to 600"),
        ({"timeout_s": float("nan")}, "timeout_s: nan is not allowed"),
    ],
)
def test_what_cannot_be_asked_is_refused_by_name(args: dict[str, Any], said: str) -> None:
    harness = Harness()
    reply = call(harness, SLEEP, **args)
    assert not reply.ok
    assert reply.message.startswith(said)
    assert harness.core.add(request_of("a", 5)) is None


def test_tags_are_those_that_there_are() -> None:
    harness = Harness()
    call(harness, SLEEP)
    reply = call(harness, WAKE_UP, tags="weights,adapters")
    assert not reply.ok
    assert reply.message == "tags: 'weights,adapters' is not allowed; weights, kv_cache"


def test_another_level_wants_to_be_awake_first() -> None:
    """The same one is nothing new."""
    harness = Harness()
    call(harness, SLEEP, level=1)
    again = call(harness, SLEEP, level=1).values
    assert (again["asleep"], again["freed_bytes"]) == (1, 64)
    reply = call(harness, SLEEP, level=2)
    assert reply.message == "asleep at level 1 already; wake up first"
    assert harness.executor.slept == [1]


def test_who_must_stay_awake_says_why() -> None:
    """By whoever knows the memory, too; and whoever is on its way out."""
    harness = Harness()
    harness.core.sleep.keeps_awake = lambda: "peers read it"
    assert call(harness, SLEEP).message == "peers read it"
    assert harness.core.add(request_of("a", 5)) is None
    harness.run()
    harness.core.sleep.keeps_awake = lambda: None
    harness.core.drain()
    assert call(harness, SLEEP).message == "the worker is on its way out"


def test_what_cannot_be_taken_again_goes_on_sleeping() -> None:
    harness = Harness()
    call(harness, SLEEP)
    harness.executor.fails_to_wake = TandemError("no room")
    reply = call(harness, WAKE_UP)
    assert reply.message == "weights could not be taken again: no room"
    assert harness.core.add(request_of("a", 5)) is not None
    harness.executor.fails_to_wake = None
    assert call(harness, WAKE_UP).ok
    assert harness.core.add(request_of("a", 5)) is None


def test_what_a_wake_up_took_is_given_back_by_a_sleep() -> None:
    """Whether it named a part or failed half-way: whoever is told that it sleeps counts on it."""
    harness, beside = Harness(), Beside()
    harness.core.sleep.beside = beside
    call(harness, SLEEP)
    call(harness, WAKE_UP, tags="weights")
    again = call(harness, SLEEP).values
    assert (again["asleep"], again["freed_bytes"]) == (1, 1064)
    assert harness.executor.slept == [1, 1]
    assert call(harness, SLEEP).ok
    assert harness.executor.slept == [1, 1], "all of it sleeps already"
    assert call(harness, WAKE_UP).ok
    assert harness.executor.woken[1:] == [SleepTag.WEIGHTS, SleepTag.KV_CACHE]
    assert beside.told == ["sleep", "wake up"]


def test_a_key_is_no_ones_after_its_abort() -> None:
    """Nothing is left of requests that a sleep ended."""
    harness = Harness()
    key = RequestKey(request_of("a", 5).key.router, "a", 0)
    harness.add(request_of("a", 40, params=params_of(max_tokens=500, ignore_eos=True)))
    harness.step()
    call(harness, SLEEP)
    assert not harness.core.holds(key)


class Beside:
    """Who moves KV past the engine, and what it was told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def sleep(self) -> int:
        self.told.append("sleep")
        return 1000

    def wake_up(self) -> None:
        self.told.append("wake up")


def test_who_moves_kv_sleeps_with_the_engine() -> None:
    """It is told once each way, and its bytes count; to wake up when all of the engine has."""
    harness, beside = Harness(), Beside()
    harness.core.sleep.beside = beside
    harness.add(request_of("a", 40, params=params_of(max_tokens=500, ignore_eos=True)))
    harness.step()
    assert call(harness, SLEEP, mode="wait").values["asleep"] == 0
    assert not beside.told, "a request lives here"
    harness.core.abort(request_of("a", 40).key)
    harness.run()
    for _ in range(2):
        assert call(harness, SLEEP, mode="wait").values["freed_bytes"] == 1064
    assert call(harness, WAKE_UP, tags="weights").ok
    assert beside.told == ["sleep"]
    for _ in range(2):
        assert call(harness, WAKE_UP).ok
    assert beside.told == ["sleep", "wake up"]
