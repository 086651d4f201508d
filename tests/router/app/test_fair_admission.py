"""The admission queue is divided between tenants; one that is alone has all of it."""

from __future__ import annotations

import asyncio

import pytest
from tests.router.app.test_admission import make_queue, turn

from tandem.router.dispatch.admission import AdmissionQueue, AdmissionRefused, Turns


def ask(queue: AdmissionQueue, tenant: str, tokens: int = 1) -> asyncio.Task[bool]:
    return asyncio.create_task(queue.enter(tokens, tenant=tenant))


async def test_a_tenant_below_its_part_waits_for_none_of_a_tenant_above_it() -> None:
    queue, _ = make_queue(max_inflight_requests=4, max_queued_requests=20, max_queued_tokens=1000)
    hog = [ask(queue, "hog") for _ in range(12)]
    await turn()
    assert queue.num_running == 4
    assert not await queue.enter(1, tenant="victim")
    assert not await queue.enter(1, tenant="victim")
    third = ask(queue, "victim")
    await turn()
    assert not third.done(), "a tenant has half of four"
    queue.leave(1, tenant="victim")
    await third
    for each in (*hog, third):
        each.cancel()
    await asyncio.gather(*hog, return_exceptions=True)


async def test_what_is_free_again_goes_to_tenants_by_turns() -> None:
    """However many requests of one wait."""
    queue, _ = make_queue(max_inflight_requests=1, max_queued_requests=99, max_queued_tokens=999)
    begun: list[str] = []

    async def one(tenant: str) -> None:
        await queue.enter(1, tenant=tenant)
        begun.append(tenant)
        await asyncio.sleep(0)
        queue.leave(1, tenant=tenant)

    tasks = [asyncio.create_task(one("a")) for _ in range(9)]
    tasks += [asyncio.create_task(one("b")) for _ in range(3)]
    await asyncio.gather(*tasks)
    assert begun[:8].count("b") == 3
    assert (queue.num_running, queue.num_waiting, queue._shares) == (0, 0, {})


async def test_a_tenant_that_fills_the_queue_is_refused_alone() -> None:
    """Another one still finds its part of it, and is told what is allowed where it does not."""
    queue, _ = make_queue(max_inflight_requests=1, max_queued_requests=4, max_queued_tokens=1000)
    tasks = [ask(queue, "hog", 10) for _ in range(5)]
    await turn()
    with pytest.raises(AdmissionRefused, match=r"4 requests of this client .* maximum 4"):
        await queue.enter(1, tenant="hog")
    tasks += [ask(queue, "victim", 90), ask(queue, "victim", 90)]
    await turn()
    assert queue.num_waiting == 6
    with pytest.raises(AdmissionRefused, match=r"2 requests of this client .* maximum 4") as no:
        await queue.enter(1, tenant="victim")
    assert no.value.retry_after > 1
    for each in tasks:
        each.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_one_tenant_may_have_all() -> None:
    queue, _ = make_queue(max_inflight_requests=3, max_queued_requests=9, max_queued_tokens=1000)
    for _ in range(3):
        assert not await queue.enter(1, tenant="only")
    waiting = [ask(queue, "only", tokens) for tokens in (50, 1, 30)]
    await turn()
    for number in range(3):
        queue.leave(1, tenant="only")
        await turn()
        assert [each.done() for each in waiting] == [at <= number for at in range(3)]


async def test_tenants_take_rounds_of_the_loop_by_turns() -> None:
    """A burst of one does not come before what another one asks next."""
    asking = ""
    turns = Turns(tenant=lambda: asking)
    begun: list[str] = []

    async def one(tenant: str) -> None:
        nonlocal asking
        asking = tenant
        await turns.take()
        begun.append(tenant)

    await asyncio.gather(*(one("hog") for _ in range(50)), one("victim"))
    assert begun.index("victim") <= 2
