"""A worker that leaves: what runs gets its time, the rest goes back, peers are waited for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from unittest.mock import Mock

import pytest
from tests.engine_plan.builders import params_of
from tests.workers.hand_router import Router
from tests.workers.proc_worker import Worker, started, submit

from tandem.engine.step import ModelRunnerOutput, SchedulerOutput
from tandem.protocol.commands import Command, CommandName
from tandem.protocol.errors import FailCause
from tandem.protocol.messages import Call, Draining, Frame, ReplyTo
from tandem.protocol.outputs import Failed
from tandem.worker.engine_proc import KILL_MARGIN, RELEASE_SECONDS, Drain, grace_before


def test_the_stages_follow_each_other() -> None:
    """Time for what runs, then for peers, then the end."""
    drain = Drain()
    assert not drain.begun
    assert drain.begin(100.0, 60.0)

    assert not drain.hands_back(159.9)
    assert drain.hands_back(160.0)
    assert not drain.over(160.0)
    assert drain.over(160.0 + RELEASE_SECONDS)


def test_the_earliest_end_counts() -> None:
    """A kubelet's and several routers' words come in any order."""
    drain = Drain()
    assert drain.begin(100.0, 60.0)
    assert not drain.begin(110.0, 60.0)
    assert drain.begin(110.0, 5.0)
    assert drain.hands_back(115.0)


def test_a_second_signal_waits_for_nobody() -> None:
    drain = Drain()
    drain.begin(100.0, 60.0)
    assert drain.begin(101.0, 0.0)
    assert drain.over(101.0)


@pytest.mark.parametrize(("killed_in", "grace"), [(135.0, 105.0), (20.0, 10.0), (0.0, 0.0)])
def test_a_known_death_leaves_time_to_hand_back(killed_in: float, grace: float) -> None:
    """Half a minute, or half of a shorter time."""
    assert grace_before(killed_in) == grace
    assert KILL_MARGIN == 30.0


def test_a_routers_word_begins_the_drain(worker: Worker, router: Router) -> None:
    """``grace_ms`` is what the pod has left: the stream is handed back well before."""
    submit(router, "long", params=params_of(max_tokens=3500, ignore_eos=True))
    started(router)
    command = Command(id=4, name=CommandName.DRAIN, args={"grace_ms": 200})
    router.say(Call(command))
    reply, failed = False, list[Failed]()
    while not (reply and failed):
        message = router.hear(Frame | ReplyTo)
        if isinstance(message, ReplyTo):
            reply = message.reply.ok
        else:
            failed += message.failed

    assert failed[0].request == "long"
    assert failed[0].cause is FailCause.DRAINING
    worker.thread.join(10)
    assert worker.status == [0]


def test_a_prefill_queue_goes_back_at_once(
    worker: Worker, router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who has computed nothing can begin elsewhere; what runs is finished."""
    monkeypatch.setattr(worker.proc, "_returns_queue", True)
    submit(router, "runs", prompt=800, params=params_of(max_tokens=150, ignore_eos=True))
    started(router)
    stopped, execute = threading.Event(), worker.executor.execute

    def slowly(plan: SchedulerOutput) -> Future[ModelRunnerOutput]:
        stopped.wait(0.1)  # many of these until what runs is through
        return execute(plan)

    monkeypatch.setattr(worker.executor, "execute", slowly)
    submit(router, "queued", prompt=800)
    while not any(each.request == "queued" for each in router.hear(Frame).accepted):
        pass
    worker.proc.stop(30.0)
    stopped.set()
    failed: list[str] = []
    finished = False
    while not finished:
        frame = router.hear(Frame)
        failed += [each.request for each in frame.failed]
        finished = any(each.finish for each in frame.outputs)
    worker.thread.join(10)

    assert worker.status == [0]
    assert failed == ["queued"]


def test_a_signal_may_interrupt_the_loop_while_it_writes(worker: Worker, router: Router) -> None:
    """Its handler runs in the thread that holds the socket's lock, and would wait for itself."""
    with worker.proc._io._lock:
        handler = threading.Thread(target=worker.proc.stop, args=[5.0])
        handler.start()
        handler.join(3)
        assert not handler.is_alive()
    assert isinstance(router.hear(Draining), Draining)


def test_spans_are_sent_when_all_else_is_let_go(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who ends a worker may kill it while a collector keeps it waiting: nobody's KV hangs on that,
    and its routers and its engine know."""
    ended: list[str] = []
    ends = {"_io": "stop", "_handoff": "close", "_core": "close"}

    def end(of: str, whole: Callable[[], object]) -> None:
        whole()
        ended.append(of)

    for of, name in ends.items():
        part = getattr(worker.proc, of)
        monkeypatch.setattr(part, name, partial(end, of, getattr(part, name)))
    monkeypatch.setattr(worker.proc, "_spans", Mock(close=partial(ended.append, "_spans")))
    assert worker.end() == 0
    assert ended == [*ends, "_spans"]
