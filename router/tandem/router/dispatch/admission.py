"""Limit of running requests, and the queue of waiting ones.

If the queue is full, a request is refused (429); after too long a wait, too (503). The order is by
priority (lower first), then fairly by tenant, then by arrival. A tenant with less than its equal
part does not wait for others: up to twice the bound runs meanwhile. The queue is divided in the
same way.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from tandem.base.fair_order import FairOrder
from tandem.protocol.errors import Refusal, RefusalCode, RequestRefused
from tandem.router.metrics import RejectReason


class Turns:
    """Turns of requests: one begins, or continues in a thread, in each round of the event loop."""

    def __init__(self, *, tenant: Callable[[], str] = str) -> None:
        """``tenant`` returns the tenant of the current task."""
        self._tenant = tenant
        self._order = FairOrder()
        self._number = 0
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        """Heap by tag and number."""
        self._taken = False

    async def take(self) -> None:
        loop = asyncio.get_running_loop()
        if self._taken:
            waits = loop.create_future()
            self._number += 1
            start = self._order.enter(self._tenant(), 1)
            heapq.heappush(self._waiting, (start, self._number, waits))
            await waits
            return
        self._taken = True
        loop.call_soon(self._next)

    def _next(self) -> None:
        while self._waiting:
            start, _, first = heapq.heappop(self._waiting)
            if not first.done():  # else its client has left
                self._order.begin(start)
                first.set_result(None)
                # After the round in which it begins.
                asyncio.get_running_loop().call_soon(self._next)
                return
        self._taken = False


SLACK = 64
"""Maximum abandoned entries of the heap, in addition to the number of waiting ones."""
REQUEST_COST = 64
"""Tokens that a request costs in addition to its prompt."""


class AdmissionRefused(RequestRefused):
    """The router is full."""

    def __init__(self, reason: RejectReason, message: str, retry_after: float) -> None:
        super().__init__(Refusal(code=RefusalCode.CAPACITY, message=message))
        self.reason = reason
        self.retry_after = retry_after
        """Seconds after which to retry."""


class RejectCounter(Protocol):
    """Counts rejections."""

    def rejected(self, reason: str) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    """Limits of running and waiting requests, in requests, prompt tokens and seconds."""

    max_inflight_requests: int
    max_inflight_tokens: int
    max_queued_requests: int
    max_queued_tokens: int
    max_queue_age: float


@dataclass(order=True, slots=True)
class _Waiting:
    priority: int
    start: int
    """Tag of its tenant's turn."""
    number: int
    tokens: int = field(compare=False)
    tenant: str = field(compare=False)
    turn: asyncio.Future[None] = field(compare=False)
    since: float = field(compare=False)


@dataclass(slots=True)
class _Amount:
    """Requests and their prompt tokens."""

    requests: int = 0
    tokens: int = 0

    def add(self, tokens: int) -> None:
        self.requests += 1
        self.tokens += tokens

    def remove(self, tokens: int) -> None:
        self.requests -= 1
        self.tokens -= tokens


@dataclass(slots=True)
class _Share:
    """Part of the router that one tenant holds."""

    running: _Amount = field(default_factory=_Amount)
    waiting: _Amount = field(default_factory=_Amount)
    heap: list[_Waiting] = field(default_factory=list)
    """Waiting requests, the next one first; abandoned ones are skipped."""


class AdmissionQueue:
    """Queue of requests: ``enter`` before dispatch, ``leave`` once after it."""

    def __init__(self, limits: AdmissionLimits, counter: RejectCounter) -> None:
        self.limits = limits
        self._counter = counter
        self._order = FairOrder()
        self._running, self._waits = _Amount(), _Amount()
        self._shares: dict[str, _Share] = {}
        """Shares of tenants with requests."""
        self._members: dict[int, _Waiting] = {}
        self._number = 0

    @property
    def num_running(self) -> int:
        return self._running.requests

    @property
    def running_tokens(self) -> int:
        return self._running.tokens

    @property
    def num_waiting(self) -> int:
        return len(self._members)

    @property
    def waiting_tokens(self) -> int:
        return self._waits.tokens

    def oldest_wait(self, now: float) -> float:
        """Return the longest current wait in seconds of ``time.monotonic``; 0 if none waits."""
        return max((now - each.since for each in self._members.values()), default=0.0)

    async def enter(self, tokens: int, *, priority: int = 0, tenant: str = "") -> bool:
        """Wait until the request may run; return whether it had to wait.

        Raises AdmissionRefused; do not ``leave`` then.
        """
        share = self._shares.setdefault(tenant, _Share())
        start = self._order.enter(tenant, tokens + REQUEST_COST)
        may_pass = not self._members or self._is_below(share, tokens)
        if may_pass and not share.waiting.requests and self._fits(tokens, share):
            self._order.begin(start)
            self._admit(tokens, share)
            return False
        try:
            self._check_room(tokens, share)
        except AdmissionRefused:
            self._forget_if_gone(tenant)
            raise
        await self._wait(tokens, priority, start, tenant)
        return True

    def leave(self, tokens: int, *, tenant: str = "") -> None:
        """Remove a request, and admit waiting ones."""
        self._running.remove(tokens)
        self._shares[tenant].running.remove(tokens)
        self._forget_if_gone(tenant)
        self._let_in()

    def _fits(self, tokens: int, share: _Share) -> bool:
        running, limits = self._running, self.limits
        if running.requests == 0:
            return True
        if (
            running.requests < limits.max_inflight_requests
            and running.tokens + tokens <= limits.max_inflight_tokens
        ):
            return True
        return self._is_below(share, tokens)

    def _is_below(self, share: _Share, tokens: int) -> bool:
        """Return whether one more request leaves one of several tenants within its part."""
        limits, tenants = self.limits, len(self._shares)
        return (
            tenants > 1
            and (share.running.requests + 1) * tenants <= limits.max_inflight_requests
            and (share.running.tokens + tokens) * tenants <= limits.max_inflight_tokens
        )

    def _admit(self, tokens: int, share: _Share) -> None:
        self._running.add(tokens)
        share.running.add(tokens)

    def _check_room(self, tokens: int, share: _Share) -> None:
        limits, tenants, own = self.limits, len(self._shares), share.waiting
        full = self.num_waiting >= limits.max_queued_requests
        if full and (tenants == 1 or (own.requests + 1) * tenants > limits.max_queued_requests):
            message = (
                f"{own.requests} requests of this client are queued, {self.num_waiting} in total; "
                f"maximum {limits.max_queued_requests}"
            )
            raise self._refused(RejectReason.REQUESTS, message)
        full = self.waiting_tokens + tokens > limits.max_queued_tokens and bool(self._members)
        if full and (tenants == 1 or (own.tokens + tokens) * tenants > limits.max_queued_tokens):
            message = (
                f"{own.tokens} prompt tokens of this client are queued, {self.waiting_tokens} in "
                f"total; maximum {limits.max_queued_tokens}"
            )
            raise self._refused(RejectReason.TOKENS, message)

    async def _wait(self, tokens: int, priority: int, start: int, tenant: str) -> None:
        turn = asyncio.get_running_loop().create_future()
        now = time.monotonic()
        waiting = _Waiting(priority, start, self._number, tokens, tenant, turn, now)
        share = self._shares[tenant]
        self._number += 1
        heapq.heappush(share.heap, waiting)
        self._members[waiting.number] = waiting
        self._waits.add(tokens)
        share.waiting.add(tokens)
        try:
            async with asyncio.timeout(self.limits.max_queue_age):
                await waiting.turn
        except BaseException as error:
            self._give_back(waiting)
            if isinstance(error, TimeoutError):
                message = f"no turn within {self.limits.max_queue_age:g} s"
                raise self._refused(RejectReason.AGE, message) from error
            raise

    def _give_back(self, waiting: _Waiting) -> None:
        if waiting.number in self._members:
            self._forget(waiting)
            self._forget_if_gone(waiting.tenant)
            self._let_in()
        elif waiting.turn.done() and not waiting.turn.cancelled():
            self.leave(waiting.tokens, tenant=waiting.tenant)

    def _let_in(self) -> None:
        while (waiting := self._next()) is not None:
            self._forget(waiting)
            if waiting.turn.done():
                self._forget_if_gone(waiting.tenant)
                continue  # cancelled at this moment
            self._order.begin(waiting.start)
            self._admit(waiting.tokens, self._shares[waiting.tenant])
            waiting.turn.set_result(None)

    def _next(self) -> _Waiting | None:
        """Return the request to run now: the first, or the first of tenants below their part."""
        firsts = [
            (first, share)
            for share in self._shares.values()
            if share.heap and (first := self._first(share)) is not None
        ]
        if not firsts:
            return None
        first, share = min(firsts)
        if self._fits(first.tokens, share):
            return first
        below = [each for each, share in firsts if self._is_below(share, each.tokens)]
        return min(below, default=None)

    def _first(self, share: _Share) -> _Waiting | None:
        heap = share.heap
        while heap and heap[0].number not in self._members:
            heapq.heappop(heap)
        return heap[0] if heap else None

    def _forget(self, waiting: _Waiting) -> None:
        """Drop a waiting request.

        Its heap entry stays: searching the heap for each of thousands is slow.
        """
        del self._members[waiting.number]
        self._waits.remove(waiting.tokens)
        share = self._shares[waiting.tenant]
        share.waiting.remove(waiting.tokens)
        if len(share.heap) > 2 * share.waiting.requests + SLACK:
            share.heap = [each for each in share.heap if each.number in self._members]
            heapq.heapify(share.heap)

    def _forget_if_gone(self, tenant: str) -> None:
        share = self._shares[tenant]
        if not share.running.requests and not share.waiting.requests:
            del self._shares[tenant]

    def _refused(self, reason: RejectReason, message: str) -> AdmissionRefused:
        self._counter.rejected(reason)
        share = self.num_waiting / max(1, self.limits.max_queued_requests)
        retry_after = 1.0 + share * min(self.limits.max_queue_age, 30.0)
        return AdmissionRefused(reason, f"the router is full: {message}", retry_after)
