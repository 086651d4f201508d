"""The admission queue: bounds, order, age, and what cancelled waiters leave behind."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from tandem.router.dispatch.admission import (
    SLACK,
    AdmissionLimits,
    AdmissionQueue,
    AdmissionRefused,
    _Waiting,
)
from tandem.router.metrics import RejectReason

LIMITS = AdmissionLimits(
    max_inflight_requests=2,
    max_inflight_tokens=100,
    max_queued_requests=2,
    max_queued_tokens=100,
    max_queue_age=5.0,
)


class Counter:
    def __init__(self) -> None:
        self.reasons: list[str] = []

    def rejected(self, reason: str) -> None:
        self.reasons.append(reason)


def make_queue(**limits: float) -> tuple[AdmissionQueue, Counter]:
    """A queue of two with a queue of two before it."""
    counter = Counter()
    return AdmissionQueue(replace(LIMITS, **limits), counter), counter  # type: ignore[arg-type]


async def turn() -> None:
    """Let every task run as far as it can."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_requests_and_tokens_are_bounded() -> None:
    """The third waits for one to leave; so does one that is too large for the moment."""
    queue, _ = make_queue()
    await queue.enter(40)
    await queue.enter(40)
    third = asyncio.create_task(queue.enter(10))
    await turn()
    assert (queue.num_running, queue.num_waiting, queue.waiting_tokens) == (2, 1, 10)
    queue.leave(40)
    await third
    large = asyncio.create_task(queue.enter(70))
    await turn()
    assert not large.done()
    queue.leave(10)
    queue.leave(40)
    await large
    assert (queue.num_running, queue.running_tokens, queue.waiting_tokens) == (1, 70, 0)


async def test_an_empty_house_takes_any_size() -> None:
    """A request larger than the whole bound runs alone."""
    queue, _ = make_queue()
    await queue.enter(1000)
    assert queue.num_running == 1


async def test_order_is_priority_then_arrival() -> None:
    """Lower priority numbers first; nobody overtakes within one."""
    queue, _ = make_queue(max_inflight_requests=1, max_queued_requests=9)
    await queue.enter(1)
    order: list[str] = []

    async def come(name: str, priority: int) -> None:
        await queue.enter(1, priority=priority)
        order.append(name)
        queue.leave(1)

    tasks = [
        asyncio.create_task(come(name, priority))
        for name, priority in (("a", 0), ("b", 5), ("c", -1), ("d", 0))
    ]
    await turn()
    queue.leave(1)
    await asyncio.gather(*tasks)

    assert order == ["c", "a", "d", "b"]
    assert queue.num_running == queue.running_tokens == 0


async def test_full_queue_refuses_at_once() -> None:
    queue, counter = make_queue()
    await queue.enter(1)
    await queue.enter(1)
    waiting = [asyncio.create_task(queue.enter(60))]
    await turn()
    with pytest.raises(AdmissionRefused, match="60 prompt tokens") as by_tokens:
        await queue.enter(60)
    waiting.append(asyncio.create_task(queue.enter(1)))
    await turn()
    with pytest.raises(AdmissionRefused, match="2 requests") as by_requests:
        await queue.enter(1)

    assert by_tokens.value.reason is RejectReason.TOKENS
    assert by_requests.value.retry_after > 1
    assert counter.reasons == ["max_num_queued_tokens", "max_num_queued_reqs"]
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert (queue.num_waiting, queue.waiting_tokens, queue.num_running) == (0, 0, 2)


async def test_age() -> None:
    """Who waited too long is sent away; the others keep their turn."""
    queue, counter = make_queue(max_queue_age=0.02)
    await queue.enter(100)
    with pytest.raises(AdmissionRefused) as caught:
        await queue.enter(1)

    assert caught.value.reason is RejectReason.AGE
    assert counter.reasons == ["max_queue_age"]
    assert (queue.num_waiting, queue.waiting_tokens) == (0, 0)


async def test_cancelled_in_the_moment_of_its_turn() -> None:
    """The place goes to the next one, whichever of the two happens first."""
    queue, _ = make_queue(max_inflight_requests=1)
    await queue.enter(1)
    first = asyncio.create_task(queue.enter(1))
    second = asyncio.create_task(queue.enter(1))
    await turn()
    queue.leave(1)
    first.cancel()
    await second
    assert first.cancelled() or await asyncio.gather(first, return_exceptions=True)
    assert queue.num_running == 1

    third = asyncio.create_task(queue.enter(1))
    await turn()
    third.cancel()
    queue.leave(1)
    await turn()
    assert (queue.num_running, queue.num_waiting, queue.waiting_tokens) == (0, 0, 0)


async def test_the_oldest_request_tells_its_age() -> None:
    """Arrival counts, not priority; who left counts no more."""
    queue, _ = make_queue(max_inflight_requests=1)
    await queue.enter(10)
    assert queue.oldest_wait(time.monotonic()) == 0.0
    old = asyncio.create_task(queue.enter(10, priority=5))
    await asyncio.sleep(0.05)
    between = time.monotonic()
    young = asyncio.create_task(queue.enter(10))
    await turn()
    now = time.monotonic()
    assert queue.oldest_wait(now) > now - between
    old.cancel()
    await turn()
    assert 0.0 < queue.oldest_wait(now) <= now - between
    young.cancel()
    await turn()
    assert queue.oldest_wait(time.monotonic()) == 0.0


async def test_a_full_queue_that_leaves_at_once_costs_by_its_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As when all are too old together: nobody looks through the others, or sorts them anew."""
    looks = 0

    def counted(compare: Callable[[object, object], bool]) -> Callable[[object, object], bool]:
        def compared(one: object, other: object) -> bool:
            nonlocal looks
            looks += 1
            return compare(one, other)

        return compared

    for name in ("__lt__", "__eq__"):
        monkeypatch.setattr(_Waiting, name, counted(getattr(_Waiting, name)))
    queue, _ = make_queue(max_inflight_requests=1, max_queued_requests=500, max_queued_tokens=500)
    await queue.enter(1)
    waiting = [asyncio.create_task(queue.enter(1)) for _ in range(500)]
    await turn()
    assert queue.num_waiting == 500
    for each in waiting:
        each.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert (queue.num_waiting, queue.waiting_tokens, queue.num_running) == (0, 0, 1)
    assert looks < 30 * len(waiting)


async def test_who_left_takes_no_memory_behind_who_stays() -> None:
    """Clients that come and leave, while one waits for long; it goes next all the same."""
    queue, _ = make_queue(max_inflight_requests=1)
    await queue.enter(1)
    stays = asyncio.create_task(queue.enter(1))
    await turn()
    for _ in range(3 * SLACK):
        leaves = asyncio.create_task(queue.enter(1))
        await asyncio.sleep(0)
        leaves.cancel()
        await asyncio.gather(leaves, return_exceptions=True)
        assert len(queue._shares[""].heap) <= SLACK + 4
    assert (queue.num_waiting, queue.waiting_tokens) == (1, 1)
    queue.leave(1)
    await stays
    assert (queue.num_waiting, queue.num_running) == (0, 1)
