"""Asleep until shortly before a copy is likely to end, awake around that moment, and no longer."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
from tests.kvtransfer.builders import Consumer, Producer, make_config, make_key

from tandem.kvtransfer import events, waiting
from tandem.kvtransfer.handoff.actions import Read
from tandem.kvtransfer.transports.mapped.copiers import HostCopier
from tandem.kvtransfer.waiting import WATCH_SECONDS, is_foretold, nap_before, watch


class Clock:
    """A time that goes on by a tick whenever somebody looks."""

    TICK = WATCH_SECONDS / 50

    def __init__(self) -> None:
        self.now = 1000.0

    def perf_counter(self) -> float:
        self.now += self.TICK
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """That of the module: no machine holds it up."""
    made = Clock()
    monkeypatch.setattr(waiting, "time", made)
    return made


def test_one_sleeps_until_the_first_moment_is_near(clock: Clock) -> None:
    """And not at all when it is near, or has just passed."""
    now = clock.now
    nap = nap_before([now + 200.0, now + 100.0])
    assert nap is not None
    assert 0.0 < nap < 100.0
    assert nap_before([now]) == 0.0


@pytest.mark.parametrize("moment", [math.inf, -math.inf, -2 * WATCH_SECONDS])
def test_what_is_not_known_or_long_past_is_not_slept_for(clock: Clock, moment: float) -> None:
    """Another copy's moment, however far, must not hide it."""
    now = clock.now
    assert not is_foretold(now + moment)
    assert nap_before([now + moment, now + 100.0]) is None
    assert nap_before([]) is None
    assert not watch([now + moment], lambda: True)


def test_one_stays_awake_until_it_stirs_or_the_moment_has_passed(clock: Clock) -> None:
    """Nothing is asked of copies whose moment is far."""
    asked: list[float] = []

    def stirs(at: int) -> bool:
        asked.append(clock.now)
        return len(asked) == at

    assert not watch([clock.now + 100.0], lambda: stirs(1))
    assert not asked
    assert watch([clock.now], lambda: stirs(2))
    assert len(asked) == 2
    now = clock.now
    assert watch([now], lambda: stirs(0)), "it ends, though nothing stirs"
    assert WATCH_SECONDS <= clock.now - now < 2 * WATCH_SECONDS


class Late:
    """Behind copies that are through at a moment that is foretold."""

    def __init__(self, copier: Foretelling) -> None:
        self._copier = copier
        self._begun: float = copier.clock.perf_counter()
        self.early = 0
        """How often one was asked long before."""

    @property
    def due(self) -> float:
        return self._begun + self._copier.seconds

    def done(self) -> bool:
        ahead: float = self.due - self._copier.clock.perf_counter()
        self.early += ahead > 0.1
        return ahead <= 0


class Foretelling:
    """A copier of the host whose copies take a while, by a clock that may be a test's own."""

    def __init__(self, inner: HostCopier, seconds: float, clock: Any = time) -> None:
        self._inner = inner
        self.seconds, self.clock = seconds, clock
        self.marks: list[Late] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def mark(self) -> Late:
        self.marks.append(Late(self))
        return self.marks[-1]


def test_a_copy_whose_end_is_foretold_is_left_alone_until_then(workers, folder) -> None:
    """Where it is not, it is asked after a hundred times. Beats, for which the thread wakes, are
    few."""
    slow = {"kv_beat_seconds": 1.0, "kv_beat_timeout": 5.0}
    config = make_config(kv_connector="shm", kv_node_folder=str(folder), **slow)
    producer, consumer = workers(Producer, config), workers(Consumer, config)
    consumer.meet(producer)
    transport = consumer.service._mover.parts.transports["shm"]
    transport._copier = copier = Foretelling(transport._copier, 0.4)
    key = make_key("late")
    consumer.open(key, producer.incarnation)
    producer.hand_over(key, 20, [1, 2, 3, 4, 5], consumer.incarnation)
    consumer.load(key, [7, 8, 9, 10, 11])
    consumer.wait_for(events.Loaded, key)
    assert 0 < sum(mark.early for mark in copier.marks) < 30


TAKES, AHEAD = 4 * WATCH_SECONDS, 2 * WATCH_SECONDS
"""What a copy takes by a clock that only looks move, and how long before its end a transfer thread
stays awake."""


class Looked:
    """The control channel of a transfer thread that waits for copies."""

    def __init__(self, inner: Any, copier: Foretelling) -> None:
        self._inner, self._copier = inner, copier
        self.near = 0
        """How often its sockets were looked after just before a copy was through."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def look(self) -> None:
        now = self._copier.clock.perf_counter()
        self.near += any(0 < mark.due - now < AHEAD for mark in self._copier.marks)
        self._inner.look()


def test_who_stays_awake_for_a_copy_hears_what_peers_say(
    workers, folder, clock: Clock, monkeypatch
) -> None:
    """FINAL, say: nobody else looks after the sockets then."""
    monkeypatch.setattr(waiting, "AHEAD_SECONDS", AHEAD)
    config = make_config(kv_connector="shm", kv_node_folder=str(folder))
    producer, consumer = workers(Producer, config), workers(Consumer, config)
    consumer.meet(producer)
    mover = consumer.service._mover
    transport = mover.parts.transports["shm"]
    transport._copier = copier = Foretelling(transport._copier, TAKES, clock)
    mover.control = looked = Looked(mover.control, copier)
    key = make_key("late")
    consumer.open(key, producer.incarnation)
    producer.hand_over(key, 20, [1, 2, 3, 4, 5], consumer.incarnation)
    consumer.load(key, [7, 8, 9, 10, 11])
    consumer.wait_for(events.Loaded, key)
    assert looked.near


def test_the_engine_hears_when_a_copy_is_likely_to_be_through(workers, folder) -> None:
    """It is woken while the copy is under way; behind its end nothing is expected any more."""
    told: list[float] = []

    def notify() -> None:
        told.append(consumer.service.expected() - time.monotonic())

    config = make_config(kv_connector="shm", kv_node_folder=str(folder))
    producer = workers(Producer, config)
    consumer = workers(Consumer, config, notify=lambda: None)
    consumer.meet(producer)
    mover = consumer.service._mover
    mover.reads._notify = notify
    transport = mover.parts.transports["shm"]
    transport._copier = copier = Foretelling(transport._copier, 60.0)
    key = make_key("late")
    consumer.open(key, producer.incarnation)
    producer.hand_over(key, 20, [1, 2, 3, 4, 5], consumer.incarnation)
    consumer.load(key, [7, 8, 9, 10, 11])
    consumer.until(lambda: told and sum(len(read.block_ids) for read in under_way(mover)) == 5)
    copier.seconds = 0.0
    consumer.wait_for(events.Loaded, key)
    assert len(told) == 1
    assert 30.0 < told[0] <= 60.0
    assert consumer.service.expected() == math.inf
    assert producer.service.expected() == math.inf


def under_way(mover: Any) -> list[Read]:
    """Reads that a transfer thread has begun."""
    return [read for read, _ in list(mover.reads._open.values())]
