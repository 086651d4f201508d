"""The dispatcher when workers are lost: by a broken link, by silence, on their way out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing

import pytest
from tests.own_ports import own_ports
from tests.router.behaviours import (
    ANSWER,
    Make,
    die_after,
    fail_with,
    hang_after,
    keep_quiet,
    refuse_with,
)
from tests.router.builders import BUSY, Stack, beats, make_request, tokens_of
from tests.router.fake_worker import FakeWorker, Turn, serve_well
from tests.waiting import until

from tandem.protocol.errors import (
    FailCause,
    Refusal,
    RefusalCode,
    RequestFailed,
)


async def test_link_breaks_while_it_is_chosen(stack: Stack, decode: Make) -> None:
    """A worker that died a moment ago, unnoticed yet: the next one is asked at once."""
    d1, d2 = decode(), decode()
    await stack.find(d1, d2)
    d2.load = BUSY
    await beats(stack, d2)
    d1.stop()
    time.sleep(0.1)  # noqa: ASYNC251  the loop must not hear of it

    assert tokens_of(await stack.run(make_request())) == ANSWER
    assert stack.metric("tandem:router_attempt_failures_total", kind="failed", reason="worker_lost")


async def test_nobody_is_up(stack: Stack) -> None:
    """Without a worker the request fails after a bounded wait."""
    with pytest.raises(RequestFailed) as caught:
        await stack.run(make_request())
    assert FailCause.WORKER_LOST is caught.value.cause


async def test_waits_for_a_worker_that_comes_back(decode: Make) -> None:
    """The only worker dies and is started again: its successor finishes the request."""
    stack = Stack(worker_wait=5.0, resume_wait=5.0)
    d = decode(behaviour=die_after(stack, 3), port=own_ports(1)[0])
    await stack.find(d)
    running = asyncio.create_task(stack.run(make_request()))
    await until(lambda: not d._thread.is_alive())
    successor = decode(port=d.port)

    assert tokens_of(await running) == ANSWER
    assert successor.submitted[0].emitted == ((100, 101, 102),)
    await stack.close()


async def test_a_lost_worker_that_is_back_goes_on_when_nobody_else_can(decode: Make) -> None:
    """The only worker hangs and wakes up: the same process finishes what it began."""
    stack = Stack(beat_timeout=0.5, worker_wait=5.0, resume_wait=5.0)
    d = decode(behaviour=hang_after(2))
    await stack.find(d)
    ids: list[int] = []

    async with (
        asyncio.TaskGroup() as others,
        aclosing(stack.stream(make_request())) as outputs,
    ):
        async for output in outputs:
            ids += output.token_ids
            if len(ids) == 2:
                others.create_task(wake_when_lost(stack, d))

    assert ids == ANSWER
    assert [len(each.emitted[0]) for each in d.submitted if each.emitted] == [2]
    await stack.close()


async def wake_when_lost(stack: Stack, worker: FakeWorker) -> None:
    """It speaks again once the router has given it up."""
    await until(lambda: not stack.pool.workers)
    worker.silent = False


async def test_what_has_begun_outlives_more_workers_than_it_has_attempts(decode: Make) -> None:
    """The only worker is lost three times, each time with the answer a little longer, and started
    again: what its client has read is not given up."""
    stack = Stack(worker_wait=5.0, resume_wait=5.0)
    lives = [decode(behaviour=die_after(stack, 2), port=own_ports(1)[0])]
    await stack.find(*lives)
    running = asyncio.create_task(stack.run(make_request()))
    for _ in range(3):
        await until(lambda: not lives[-1]._thread.is_alive())
        lives.append(decode(behaviour=die_after(stack, 2), port=lives[0].port))

    assert tokens_of(await running) == ANSWER
    assert [len(life.submitted[0].emitted_of(0)) for life in lives] == [0, 2, 4, 6]
    await stack.close()


async def test_three_faults_at_once_do_not_end_what_has_begun(prefill: Make, decode: Make) -> None:
    """The prefill worker is lost after token 1, the next one's KV does not come, the decode worker
    is lost: the other one goes on."""

    def lose(turn: Turn) -> Iterator[float]:
        turn.accept()
        if len(d1.submitted) == 1:
            yield 60.0  # until token 1 has come from the prefill worker, and that was lost
        yield 0.05
        if len(d1.submitted) == 2:
            turn.fail(FailCause.PEER)
        else:
            turn.worker._stop.set()

    stack = Stack(worker_wait=5.0, resume_wait=5.0)
    p1, d1, d2 = prefill(behaviour=die_after(stack, 1)), decode(behaviour=lose), decode(load=BUSY)
    await stack.find(p1, d1, d2)
    await beats(stack, d2)
    p2 = prefill(behaviour=keep_quiet, load=BUSY)
    await stack.find(p2, d1, d2)
    await beats(stack, p2)

    assert tokens_of(await stack.run(make_request())) == ANSWER
    reasons = "tandem:router_attempt_failures_total"
    assert stack.metric(reasons, kind="failed", reason="worker_lost") == 2
    assert stack.metric(reasons, kind="failed", reason="peer") == 1
    assert d2.submitted[-1].emitted == ((100,),)
    await stack.close()


async def test_a_request_that_cannot_be_sent_costs_no_attempt(decode: Make) -> None:
    """A link that is down when it is chosen: nobody did any work."""
    stack = Stack(max_attempts=1)
    d1, d2 = decode(), decode(load=BUSY)
    await stack.find(d1, d2)
    await beats(stack, d2)
    stack.pool.workers[d1.incarnation].connection.submit = lambda *_: False  # type: ignore[method-assign]

    assert tokens_of(await stack.run(make_request())) == ANSWER
    assert len(d2.submitted) == 1
    await stack.close()


async def test_what_has_begun_waits_longer_for_a_successor(decode: Make) -> None:
    """The only worker is lost after two tokens, and another comes when a new request would long
    have been told that nobody is there."""
    stack = Stack(beat_timeout=0.5, worker_wait=0.1, resume_wait=8.0)
    d = decode(behaviour=hang_after(2))
    await stack.find(d)
    ids: list[int] = []
    async with asyncio.TaskGroup() as others, aclosing(stack.stream(make_request())) as outputs:
        async for output in outputs:
            ids += output.token_ids
            if len(ids) == 2:
                others.create_task(replace_when_lost(stack, decode))
    assert ids == ANSWER
    await stack.close()


async def replace_when_lost(stack: Stack, decode: Make) -> None:
    """Another worker comes, once a new request has been refused for want of one."""
    await until(lambda: not stack.pool.workers)
    with pytest.raises(RequestFailed, match="no worker"):
        await stack.run(make_request())
    await stack.find(decode())


async def test_who_was_full_is_asked_again_while_a_request_waits(decode: Make) -> None:
    """A worker is lost, and the other one has no room for its answer until others have ended: the
    answer does not wait for the lost one's successor."""
    full = iter([True, True])

    def soon(turn: Turn) -> Iterator[float]:
        if next(full, False):
            turn.refuse(Refusal(code=RefusalCode.CAPACITY, message="full"))
        else:
            yield from serve_well(turn)

    stack = Stack(resume_wait=30.0)
    d1, d2 = decode(behaviour=die_after(stack, 2)), decode(behaviour=soon)
    await stack.find(d1, d2)
    d2.load = BUSY
    await beats(stack, d2)

    assert tokens_of(await stack.run(make_request())) == ANSWER
    assert [len(each.emitted_of(0)) for each in d2.submitted] == [2, 2, 2]
    await stack.close()


async def test_asking_the_full_again_lengthens_no_wait(decode: Make) -> None:
    """Nor does it count as refusals, of which a request bears a few."""
    stack = Stack(worker_wait=1.5)
    d1, d2 = (
        decode(behaviour=die_after(stack, 0)),
        decode(behaviour=refuse_with(RefusalCode.CAPACITY)),
    )
    await stack.find(d1, d2)
    d2.load = BUSY
    await beats(stack, d2)

    with pytest.raises(RequestFailed, match="no worker finished it in 2 attempts"):
        await stack.run(make_request())
    assert len(d2.submitted) == 2
    await stack.close()


async def test_what_has_begun_does_not_wait_for_ever(decode: Make) -> None:
    stack = Stack(beat_timeout=0.5, worker_wait=0.0, resume_wait=0.2)
    d = decode(behaviour=hang_after(1))
    await stack.find(d)

    async def read() -> None:
        async with aclosing(stack.stream(make_request())) as outputs:
            async for _ in outputs:
                pass

    with pytest.raises(RequestFailed, match="no worker finished it"):
        await read()
    await stack.close()


async def test_a_worker_that_failed_by_its_own_fault_is_not_asked_again(decode: Make) -> None:
    """Only a lost link is forgiven: a worker that said FAILED would say it again."""
    stack = Stack(worker_wait=0.2)
    d = decode(behaviour=fail_with(FailCause.INTERNAL))
    await stack.find(d)

    with pytest.raises(RequestFailed):
        await stack.run(make_request())
    assert len(d.submitted) == 1
    await stack.close()


@pytest.mark.parametrize(
    "behaviour",
    [refuse_with(RefusalCode.DRAINING), fail_with(FailCause.DRAINING)],
    ids=["refuses", "gives it back"],
)
async def test_waits_for_the_successor_of_one_that_leaves(
    decode: Make, behaviour: Callable[[Turn], Iterator[float]]
) -> None:
    """The only worker is on its way out, and refuses, or gives back what it had under way when its
    drain was over: the one that replaces it takes the request."""
    stack = Stack(worker_wait=5.0)
    leaving = decode(behaviour=behaviour)
    await stack.find(leaving)
    running = asyncio.create_task(stack.run(make_request()))
    await until(lambda: len(leaving.submitted) == 1)
    successor = decode()
    await stack.find(successor)

    assert tokens_of(await running) == ANSWER
    assert len(successor.submitted) == 1
    await stack.close()


async def test_silent_worker_is_lost(decode: Make) -> None:
    """A process that hangs keeps its socket open; the beats tell."""
    stack = Stack(beat_timeout=0.5)
    d1, d2 = decode(behaviour=hang_after(2)), decode()
    await stack.find(d1, d2)
    d2.load = BUSY
    await beats(stack, d2)
    ids: list[int] = []

    async with aclosing(stack.stream(make_request())) as outputs:
        async for output in outputs:
            ids += output.token_ids

    assert ids == ANSWER
    assert [each.emitted for each in d2.submitted] == [((100, 101),)]
    await stack.close()
