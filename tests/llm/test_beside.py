"""Threads for long work are divided between tenants."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextvars import ContextVar

import pytest
import pytest_asyncio
from tests.waiting import wait_for

from tandem.llm.cpu_pool import IN_LOOP, LARGE, CpuPool
from tandem.protocol.errors import RequestRefused

tenant: ContextVar[str] = ContextVar("tenant", default="")


class Works:
    """Work that is done when it is told, and the order in which it began."""

    def __init__(self, cpu_pool: CpuPool) -> None:
        self.cpu_pool = cpu_pool
        self.begun: list[str] = []
        self.ends: dict[str, threading.Event] = {}

    def ask(self, name: str, size: int) -> asyncio.Task[None]:
        """Work of the tenant that is the first letter of its name."""
        tenant.set(name[0])
        self.ends[name] = threading.Event()
        return asyncio.create_task(self.cpu_pool.run(size, self._do, name))

    def _do(self, name: str) -> None:
        self.begun.append(name)
        assert self.ends[name].wait(30)

    async def until(self, *begun: str) -> None:
        """Wait until these have begun, and no others."""
        await asyncio.to_thread(wait_for, lambda: len(self.begun) >= len(begun))
        assert set(self.begun) == set(begun)

    def end(self, *names: str) -> None:
        for name in names:
            self.ends[name].set()


@pytest_asyncio.fixture
async def works() -> AsyncIterator[Works]:
    made = Works(CpuPool(2, tenant=tenant.get))
    yield made
    made.end(*made.ends)
    made.cpu_pool.close()


async def test_large_texts_of_one_tenant_leave_a_thread_to_others(works: Works) -> None:
    """The text of another tenant waits for none of them."""
    hog = [works.ask(f"h{number}", LARGE) for number in range(60)]
    await works.until("h0")
    victim = works.ask("v0", IN_LOOP)
    await works.until("h0", "v0")
    works.end("v0")
    await victim
    for each in hog:
        each.cancel()


async def test_tenants_take_turns_by_size(works: Works) -> None:
    """Many short texts of one tenant do not keep one of another waiting."""
    tasks = [works.ask(f"h{number}", IN_LOOP) for number in range(20)]
    await works.until("h0", "h1")
    tasks.append(works.ask("v0", IN_LOOP))
    await asyncio.sleep(0)
    works.end("h0")
    await works.until("h0", "h1", "v0")
    works.end(*works.ends)
    await asyncio.gather(*tasks)


async def test_without_tenants_all_threads_are_taken_in_the_order_of_asking() -> None:
    works = Works(CpuPool(2))
    tasks = [works.ask(f"h{number}", LARGE) for number in range(4)]
    await works.until("h0", "h1")
    works.end("h0", "h1")
    await works.until("h0", "h1", "h2", "h3")
    works.end(*works.ends)
    await asyncio.gather(*tasks)
    works.cpu_pool.close()


async def test_work_that_left_keeps_no_other_work_waiting(works: Works) -> None:
    """Neither in the queue nor when it has just got a thread."""
    first, second = works.ask("h0", LARGE), works.ask("h1", LARGE)
    third = works.ask("h2", IN_LOOP)
    await works.until("h0")
    second.cancel()
    await works.until("h0", "h2")
    works.end("h0", "h2")
    await asyncio.gather(first, third)
    assert works.cpu_pool._num_free == 2
    assert works.cpu_pool._num_free_for_large == 1
    assert not works.cpu_pool._queues


async def test_a_refusal_says_how_long_it_waited(works: Works) -> None:
    works.cpu_pool._wait_seconds = 0.01
    refused: list[int] = []
    works.cpu_pool.on_refused = lambda: refused.append(1)
    tasks = [works.ask("h0", IN_LOOP), works.ask("h1", IN_LOOP)]
    await works.until("h0", "h1")
    with pytest.raises(RequestRefused, match=r"no thread was free for this one within 0\.01 s"):
        await works.ask("h2", IN_LOOP)
    assert refused == [1]
    works.end("h0", "h1")
    await asyncio.gather(*tasks)
