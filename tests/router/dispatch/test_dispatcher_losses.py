"""The dispatcher when workers are lost: by a broken link, by silence, on their way out."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing

import pytest
from tests.router.behaviours import ANSWER, Make, die_after, fail_with, refuse_with
from tests.router.builders import BUSY, Stack, beats, make_request, tokens_of
from tests.router.fake_worker import FakeWorker
from tests.waiting import until

from tandem.protocol.errors import (
    FailCause,
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
    d = decode(behaviour=die_after(3))
    await stack.find(d)
    running = asyncio.create_task(stack.run(make_request()))
    await until(lambda: not d._thread.is_alive())
    successor = decode(port=d.port)

    assert tokens_of(await running) == ANSWER
    assert successor.submitted[0].emitted == ((100, 101, 102),)
    await stack.close()


async def test_a_lost_worker_that_is_back_goes_on_when_nobody_else_can(decode: Make) -> None:
    """The only worker hangs and wakes up: the same process finishes what it began."""
    stack = Stack(worker_wait=5.0, resume_wait=5.0)
    d = decode(step=0.05)
    await stack.find(d)
    ids: list[int] = []

    async with (
        asyncio.TaskGroup() as others,
        aclosing(stack.stream(make_request())) as outputs,
    ):
        async for output in outputs:
            ids += output.token_ids
            if len(ids) == 2:
                d.silent = True
                others.create_task(wake_when_lost(stack, d))

    assert ids == ANSWER
    assert [len(each.emitted[0]) for each in d.submitted if each.emitted] == [2]
    await stack.close()


async def wake_when_lost(stack: Stack, worker: FakeWorker) -> None:
    """It speaks again once the router has given it up."""
    await until(lambda: not stack.pool.workers)
    worker.silent = False


async def test_what_has_begun_waits_longer_for_a_successor(decode: Make) -> None:
    """The only worker is lost after two tokens, and another comes when a new request would long
    have been told that nobody is there."""
    stack = Stack(worker_wait=0.1, resume_wait=8.0)
    d = decode(step=0.05)
    await stack.find(d)
    ids: list[int] = []
    async with asyncio.TaskGroup() as others, aclosing(stack.stream(make_request())) as outputs:
        async for output in outputs:
            ids += output.token_ids
            if len(ids) == 2:
                d.silent = True
                others.create_task(replace_when_lost(stack, decode))
    assert ids == ANSWER
    await stack.close()


async def replace_when_lost(stack: Stack, decode: Make) -> None:
    """Another worker comes, once a new request has been refused for want of one."""
    await until(lambda: not stack.pool.workers)
    with pytest.raises(RequestFailed, match="no worker"):
        await stack.run(make_request())
    await stack.find(decode())


async def test_what_has_begun_does_not_wait_for_ever(decode: Make) -> None:
    """Nobody comes: it is told so, with what happened."""
    stack = Stack(worker_wait=0.0, resume_wait=0.2)
    d = decode(step=0.05)
    await stack.find(d)

    async def read() -> None:
        async with aclosing(stack.stream(make_request())) as outputs:
            async for _ in outputs:
                d.silent = True

    with pytest.raises(RequestFailed, match="no worker could finish it"):
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


async def test_waits_for_the_successor_of_one_that_leaves(decode: Make) -> None:
    """The only worker refuses, on its way out: the one that replaces it takes the request."""
    stack = Stack(worker_wait=5.0)
    leaving = decode(behaviour=refuse_with(RefusalCode.DRAINING))
    await stack.find(leaving)
    running = asyncio.create_task(stack.run(make_request()))
    await until(lambda: len(leaving.submitted) == 1)
    successor = decode()
    await stack.find(successor)

    assert tokens_of(await running) == ANSWER
    assert len(successor.submitted) == 1
    await stack.close()


async def test_silent_worker_is_lost(stack: Stack, decode: Make) -> None:
    """A process that hangs keeps its socket open; the beats tell."""
    d1, d2 = decode(step=0.05), decode()
    await stack.find(d1, d2)
    d2.load = BUSY
    await beats(stack, d2)
    ids: list[int] = []

    async with aclosing(stack.stream(make_request())) as outputs:
        async for output in outputs:
            ids += output.token_ids
            if len(ids) == 2:
                d1.silent = True

    assert ids == ANSWER
    assert len(d2.submitted) == 1
