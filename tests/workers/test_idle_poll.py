"""An idle step loop stays awake where that has been worth it, and sleeps everywhere else."""

from __future__ import annotations

import ctypes
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from tests.workers.hand_router import Router
from tests.workers.io_worker import Worker as IOWorker
from tests.workers.proc_worker import Worker, frames, submit

from tandem.engine import threads
from tandem.engine.core.engine_core import StepOutputs
from tandem.engine.threads import AHEAD_SECONDS, LATE_SECONDS, IdlePoll
from tandem.worker.cache_snapshots import CacheSnapshots
from tandem.worker.engine_proc import IDLE_SECONDS, PARKED_SECONDS, EngineCoreProc
from tandem.worker.io import Inbox


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock that ``IdlePoll`` reads."""
    clock = Clock()
    monkeypatch.setattr(threads, "time", clock)
    return clock


def gap(poll: IdlePoll, clock: Clock, seconds: float) -> float:
    """Be idle for so long; for how much of it the loop would have been awake."""
    awake = poll.begin() - clock.now
    clock.now += seconds
    poll.end()
    return min(seconds, max(0.0, awake))


def test_it_polls_after_work_that_came_soon_and_sleeps_after_any_other(clock: Clock) -> None:
    """One long gap is paid for once, one short gap earns the next."""
    poll = IdlePoll(0.02)
    gaps = [0.003, 0.003, 0.019, 5.0, 5.0, 0.003, 0.003]
    assert [gap(poll, clock, each) for each in gaps] == pytest.approx(
        [0.0, 0.003, 0.019, 0.02, 0.0, 0.0, 0.003]
    )


def test_a_gap_counts_from_its_beginning(clock: Clock) -> None:
    """The loop looks around while it is idle, every second; that makes no short gaps of it."""
    poll = IdlePoll(0.02)
    gap(poll, clock, 0.001)
    first = poll.begin()
    clock.now += 1.0
    assert poll.begin() == first
    clock.now += 0.001
    poll.end()
    assert poll.begin() <= clock.now


def test_without_time_to_poll_it_always_sleeps(clock: Clock) -> None:
    """The default on a CPU, whose cores compute."""
    poll = IdlePoll(0.0)
    assert [gap(poll, clock, 0.0) for _ in range(3)] == [0.0, 0.0, 0.0]


def loop_of(idle: IdlePoll, attend: Any, *, has_work: bool, expected: float = math.inf) -> Any:
    """As much of a step loop as being idle takes."""
    core: Any = SimpleNamespace(has_work=has_work)
    return SimpleNamespace(
        _cache_snapshots=CacheSnapshots(core),
        _handoff=SimpleNamespace(expected=lambda: expected),
        _idle=idle,
        _inbox=Inbox(),
        _io=SimpleNamespace(attend=attend),
        _core=core,
    )


def test_it_sleeps_while_kv_is_on_its_way(clock: Clock) -> None:
    """The thread that moves the KV shares the interpreter with the loop."""
    idle, slept = IdlePoll(0.02), []
    gap(idle, clock, 0.001)

    def attend(seconds: float, awake_until: float = 0.0) -> None:
        slept.append((seconds, awake_until))

    EngineCoreProc._receive(loop_of(idle, attend, has_work=True), block=True)
    EngineCoreProc._receive(loop_of(idle, attend, has_work=False), block=True)
    assert slept == [(PARKED_SECONDS, 0.0), (IDLE_SECONDS, pytest.approx(clock.now + 0.02))]


def test_it_is_awake_when_kv_is_expected(clock: Clock) -> None:
    """It sleeps until shortly before that moment, polls around it, and sleeps on where nothing has
    come by a while later; where it never polls it only sleeps."""
    told: list[tuple[float, float]] = []
    moment = clock.now + 0.01

    def attend(seconds: float, awake_until: float = 0.0) -> None:
        told.append((seconds, awake_until))
        clock.now = max(clock.now + 1e-6, min(clock.now + seconds, awake_until or math.inf))

    for idle in (IdlePoll(0.02), IdlePoll(0.0)):
        for _ in range(2):
            loop = loop_of(idle, attend, has_work=True, expected=moment)
            EngineCoreProc._receive(loop, block=True)
    ahead = pytest.approx(0.01 - AHEAD_SECONDS)
    awake = (PARKED_SECONDS, moment + LATE_SECONDS)
    assert told == [(ahead, 0.0), awake, (PARKED_SECONDS, 0.0), (PARKED_SECONDS, 0.0)]
    told.clear()
    far = loop_of(IdlePoll(0.02), attend, has_work=True, expected=clock.now + 9.0)
    EngineCoreProc._receive(far, block=True)
    assert told == [(PARKED_SECONDS, 0.0)]


def test_work_that_came_without_a_message_ends_the_idle_time_too(clock: Clock) -> None:
    """KV that a connector found loaded: the next idle time counts from its own beginning."""
    idle, awake = IdlePoll(0.02), []
    gap(idle, clock, 0.001)

    def attend(seconds: float, awake_until: float = 0.0) -> None:
        awake.append(max(0.0, awake_until - clock.now))
        clock.now += 0.01

    # KV is on its way; it is there, and steps are made; then there is nothing to do.
    for has_work, block in ((True, True), (True, False), (False, True)):
        EngineCoreProc._receive(loop_of(idle, attend, has_work=has_work), block=block)
        clock.now += 3.0 * (not block)
    assert awake == pytest.approx([0.0, 0.02])


class Poller:
    """Notes how long each call of one thread may sleep, and tells when one has called often."""

    def __init__(self, real: Any, often: int, told: Callable[[], object]) -> None:
        self._real = real
        self._often, self._told = often, told
        self.waits: dict[int, list[float]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def poll(self, milliseconds: float) -> Any:
        mine = self.waits.setdefault(threading.get_ident(), [])
        mine.append(milliseconds)
        if len(mine) == self._often:
            self._told()
        return self._real.poll(milliseconds)


@pytest.fixture
def io() -> Iterator[IOWorker]:
    worker = IOWorker()
    worker.thread.start()
    yield worker
    worker.thread.stop()


@pytest.mark.parametrize("awake", [True, False])
def test_attending_awake_only_naps(io: IOWorker, awake: bool) -> None:
    """It asks again and again until something comes; otherwise it asks once and sleeps."""
    often, put = 51, partial(io.inbox.put, None)
    poller = Poller(io.thread._poller, often, put if awake else int)
    io.thread._poller = poller  # type: ignore[assignment]
    io.inbox.take()
    soon = threading.Timer(0.2, put)
    if not awake:
        soon.start()
    io.thread.attend(10, time.monotonic() + 60 if awake else 0.0)
    soon.cancel()
    assert io.inbox.take() == [None]
    mine = poller.waits[threading.get_ident()]
    assert (max(mine) == 0.0) == awake
    assert (len(mine) >= often) == awake


@pytest.mark.skipif(sys.platform != "linux", reason="Linux rounds naps up, others do not")
def test_naps_of_a_step_loop_are_not_rounded_up(
    worker: Worker, router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel's slack of 50 us is taken from its thread, and from no other."""
    slack: list[int] = []
    advance = worker.core.advance

    def noted() -> StepOutputs:
        slack.append(ctypes.CDLL(None).prctl(30))  # PR_GET_TIMERSLACK, in ns
        return advance()

    monkeypatch.setattr(worker.core, "advance", noted)
    submit(router, "a")
    frames(router, "a")
    assert set(slack) == {1}
    assert ctypes.CDLL(None).prctl(30) > 1


def test_a_step_loop_stays_awake_between_requests_that_follow_each_other() -> None:
    """The first gap teaches it; a request after a short one finds it polling."""
    worker = Worker(idle_poll_ms=1000)
    # What may be set is less than a busy machine's gap can be.
    worker.proc._idle = IdlePoll(10 * worker.proc._idle._seconds)
    attended: list[bool] = []
    attend = worker.proc._io.attend

    def noted(seconds: float, awake_until: float = 0.0) -> None:
        attended.append(awake_until > time.monotonic())
        attend(seconds, awake_until)

    worker.proc._io.attend = noted  # type: ignore[method-assign]
    router = Router(worker.proc.endpoint)
    try:
        router.greet()
        for name in ("a", "b", "c"):
            submit(router, name)
            frames(router, name)
            time.sleep(0.1)
        assert attended[-1]
    finally:
        router.socket.close()
        assert worker.end() == 0
        worker.probes.close()
