"""Bodies that are being read: divided between tenants, and bounded by their progress."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest

from tandem.router.dispatch.admission import Turns
from tandem.router.http.errors import HttpProblem
from tandem.router.http.held_bytes import (
    PART_BYTES,
    PROGRESS_BYTES,
    STILL_SECONDS,
    BodyLimit,
    HeldBytes,
)
from tandem.router.tenant import Tenant, current_tenant

KIB = 1 << 10


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_tenant_leaves_free_bytes_to_others() -> None:
    """The first has two thirds; each further one still finds some."""
    held = HeldBytes(900 * KIB)
    hog = held.enter("hog", lambda: None)
    assert held.add(hog, 600 * KIB)
    late = held.enter("hog", lambda: None)
    assert not held.add(late, 10 * KIB)
    held.let_go(late)
    victim = held.enter("victim", lambda: None)
    assert held.add(victim, 200 * KIB)
    assert "those of this client 204800; at most 921600" in held.why_full(victim)
    third = held.enter("third", lambda: None)
    assert held.add(third, 30 * KIB)
    for each in (hog, victim, third):
        held.let_go(each)
    assert held.num_bytes == 0
    assert not held._by_tenant


def test_without_keys_one_may_hold_all() -> None:
    held = HeldBytes(100)
    assert held.add(held.enter("", lambda: None), 100)
    second = held.enter("", lambda: None)
    assert not held.add(second, 1)
    alone = HeldBytes(100)
    assert alone.add(alone.enter("a", lambda: None), 1_000)


@pytest.mark.parametrize("tenant", ["", "hog"])
def test_uploads_that_stand_still_end_for_one_that_moves(tenant: str) -> None:
    """Of the same tenant; those that move, and those that came whole, stay."""
    ended: list[str] = []
    clock = Clock()
    held = HeldBytes(300 * KIB, clock)
    names = ("still", "whole", "moves")
    ones = {name: held.enter(tenant, partial(ended.append, name)) for name in names}
    for each in ones.values():
        assert held.add(each, 60 * KIB)
    held.came_whole(ones["whole"])
    other = held.enter("other", lambda: ended.append("other"))
    assert held.add(other, KIB)
    clock.now = STILL_SECONDS + 1
    assert held.add(ones["moves"], PROGRESS_BYTES)
    new = held.enter(tenant, lambda: ended.append("new"))
    assert held.add(new, 120 * KIB if not tenant else 50 * KIB)
    assert ended == ["still"]


def test_bytes_that_trickle_are_no_progress() -> None:
    """An upload that brings one byte a second stands still."""
    clock, ended = Clock(), []
    held = HeldBytes(100 * KIB, clock)
    trickles = held.enter("", lambda: ended.append("trickles"))
    assert held.add(trickles, 90 * KIB)
    for _ in range(9):
        clock.now += 1
        held.add(trickles, 1)
    assert held.add(held.enter("", lambda: None), 50 * KIB)
    assert ended == ["trickles"]


class Client:
    """One upload, part by part, to an app that reads all of it."""

    def __init__(self, limit: BodyLimit, tenant: str) -> None:
        self._parts: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        current_tenant.set(Tenant(tenant))
        self.task = asyncio.create_task(
            limit({"type": "http", "headers": []}, self._parts.get, _to)
        )

    def send(self, size: int, *, more: bool = True) -> None:
        self._parts.put_nowait({"type": "http.request", "body": bytes(size), "more_body": more})

    async def refused(self) -> HttpProblem:
        async with asyncio.timeout(30):
            with pytest.raises(HttpProblem) as found:
                await self.task
        return found.value


async def _to(message: Any) -> None:
    """A client that takes its answer."""


async def _reads(scope: Any, receive: Any, send: Any) -> None:
    """An app that reads a body and holds it."""
    while (await receive())["more_body"]:
        pass


async def test_a_stalled_upload_is_answered_503_for_another_one() -> None:
    """It is told what is held, and when to come again; the other one goes on."""
    limit = BodyLimit(_reads, 1 << 20, 100 * KIB, Turns(), stall_seconds=60)
    clock = Clock()
    limit._held._clock = clock
    stalled = Client(limit, "")
    stalled.send(80 * KIB)
    await asyncio.sleep(0.01)
    clock.now = STILL_SECONDS + 1
    other = Client(limit, "")
    other.send(50 * KIB, more=False)
    await other.task
    answer = (await stalled.refused()).answer
    assert (answer.status, answer.headers["Retry-After"]) == (503, "2")
    assert "at most 102400 are held" in answer.message
    assert limit._held.num_bytes == 0


async def test_an_upload_that_stands_still_is_given_up() -> None:
    limit = BodyLimit(_reads, 1 << 20, 1 << 20, Turns(), stall_seconds=0.05)
    upload = Client(limit, "")
    upload.send(80 * KIB)
    answer = (await upload.refused()).answer
    assert (answer.status, answer.code) == (408, "request_timeout")
    assert limit._held.num_bytes == 0


async def test_stalled_uploads_of_one_tenant_leave_room_for_another() -> None:
    """At once, and though none of them has been still for long."""
    limit = BodyLimit(_reads, 32 * KIB, 512 * KIB, Turns(), stall_seconds=60)
    uploads = [Client(limit, "hog") for _ in range(24)]
    for each in uploads:
        each.send(31 * KIB)
    await asyncio.sleep(0.01)
    assert any(each.task.done() for each in uploads)
    victim = Client(limit, "victim")
    victim.send(31 * KIB, more=False)
    await victim.task
    for each in uploads:
        each.task.cancel()
    await asyncio.gather(*(each.task for each in uploads), return_exceptions=True)


async def test_parts_of_uploads_take_turns() -> None:
    """Uploads at full speed leave rounds of the loop to others."""
    taken: list[str] = []

    class Counted(Turns):
        async def take(self) -> None:
            taken.append(current_tenant.get().id)
            await super().take()

    limit = BodyLimit(_reads, 1 << 20, 1 << 20, Counted())
    upload = Client(limit, "hog")
    for _ in range(4):
        upload.send(PART_BYTES)
    upload.send(1, more=False)
    await upload.task
    assert taken == ["hog"] * 4
