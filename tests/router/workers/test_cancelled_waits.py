"""Who waits for a worker and is cancelled in the very moment in which the wait ends has left."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from tests.router.builders import Stack
from tests.router.fake_worker import FakeWorker

from tandem.protocol.commands import Command, CommandName, Reply

TURNS = range(8)
"""Turns of the loop between the end of a wait and the cancel, until who waited has gone on."""


async def let_pass(turns: int) -> None:
    for _ in range(turns):
        await asyncio.sleep(0)


async def is_cancelled(waiting: asyncio.Task[object]) -> bool:
    """Cancel it now, if it has not ended: whether that came through."""
    if waiting.done():
        return True
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    return waiting.cancelled()


async def test_a_wait_for_a_change(stack: Stack) -> None:
    """A call whose client leaves as a worker comes up is not placed any more."""
    for turns in TURNS:
        waiting: asyncio.Task[object] = asyncio.create_task(stack.pool.wait_change(60))
        await let_pass(3)
        stack.pool._announce()
        await let_pass(turns)
        assert await is_cancelled(waiting)


async def test_a_call(stack: Stack, decode: Callable[..., FakeWorker]) -> None:
    """A command whose caller leaves as its reply comes."""
    d = decode()
    await stack.find(d)
    d.silent = True
    connection = stack.pool.workers[d.incarnation].connection
    command = Command(id=1, name=CommandName.STATS)
    for turns in TURNS:
        waiting: asyncio.Task[object] = asyncio.create_task(connection.call(command, 60))
        await let_pass(3)
        (future,) = connection._calls.values()
        future.set_result(Reply(id=1, ok=True))
        await let_pass(turns)
        assert await is_cancelled(waiting)
        assert not connection._calls
