"""How many requests run at once, and the bounded queue before them.

A request that finds the queue full is refused at once (429); one that waited too long is sent away
(503). Both are told when to come again. By priority (lower first), then by arrival.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from tandem.protocol.errors import Refusal, RefusalCode, RequestRefused

SLACK = 64
"""Entries of those who left that the heap may keep beside as many as wait."""


class RejectReason(StrEnum):
    """Why a request was not admitted; the first two are vLLM's words."""

    REQUESTS = "max_num_queued_reqs"
    TOKENS = "max_num_queued_tokens"
    AGE = "max_queue_age"
    LARGE = "large_requests"
    """No thread was free for what takes long before a request can be queued."""


class AdmissionRefused(RequestRefused):
    """The router itself is full."""

    def __init__(self, reason: RejectReason, message: str, retry_after: float) -> None:
        super().__init__(Refusal(code=RefusalCode.CAPACITY, message=message))
        self.reason = reason
        self.retry_after = retry_after
        """Seconds after which it may be worth to try again."""


class RejectCounter(Protocol):
    """Counts rejections."""

    def rejected(self, reason: str) -> None:
        """One more, for this reason."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    """Requests, prompt tokens and seconds."""

    max_inflight_requests: int
    max_inflight_tokens: int
    max_queued_requests: int
    max_queued_tokens: int
    max_queue_age: float


@dataclass(order=True, slots=True)
class _Waiting:
    priority: int
    number: int
    tokens: int = field(compare=False)
    turn: asyncio.Future[None] = field(compare=False)
    since: float = field(compare=False)


class AdmissionQueue:
    """``enter`` before dispatch, ``leave`` once after, whatever became of the request."""

    def __init__(self, limits: AdmissionLimits, counter: RejectCounter) -> None:
        self.limits = limits
        self.num_running = 0
        self.running_tokens = 0
        self.waiting_tokens = 0
        self._counter = counter
        self._heap: list[_Waiting] = []
        """Who waits, the one that goes first at first; who has left is skipped when it comes up."""
        self._members: dict[int, _Waiting] = {}
        """Who waits, by number."""
        self._number = 0

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their turn."""
        return len(self._members)

    def oldest_wait(self, now: float) -> float:
        """Seconds that whoever came first has waited by ``now`` (``time.monotonic``); 0 if nobody
        waits."""
        return max((now - each.since for each in self._members.values()), default=0.0)

    async def enter(self, tokens: int, *, priority: int = 0) -> bool:
        """Return when the request may run: whether it has waited for that, maybe with others that
        were let in at once. Raises AdmissionRefused; then do not ``leave``."""
        if not self._members and self._fits(tokens):
            self._admit(tokens)
            return False
        self._check_room(tokens)
        await self._wait(tokens, priority)
        return True

    def leave(self, tokens: int) -> None:
        """A request that had entered is over: let others in."""
        self.num_running -= 1
        self.running_tokens -= tokens
        self._let_in()

    def _fits(self, tokens: int) -> bool:
        """An empty house takes a request of any size."""
        if self.num_running == 0:
            return True
        return (
            self.num_running < self.limits.max_inflight_requests
            and self.running_tokens + tokens <= self.limits.max_inflight_tokens
        )

    def _admit(self, tokens: int) -> None:
        self.num_running += 1
        self.running_tokens += tokens

    def _check_room(self, tokens: int) -> None:
        limits = self.limits
        if self.num_waiting >= limits.max_queued_requests:
            message = f"{self.num_waiting} requests wait already"
            raise self._refused(RejectReason.REQUESTS, message)
        if self.waiting_tokens + tokens > limits.max_queued_tokens and self._members:
            message = f"{self.waiting_tokens} prompt tokens wait already"
            raise self._refused(RejectReason.TOKENS, message)

    async def _wait(self, tokens: int, priority: int) -> None:
        turn = asyncio.get_running_loop().create_future()
        waiting = _Waiting(priority, self._number, tokens, turn, time.monotonic())
        self._number += 1
        heapq.heappush(self._heap, waiting)
        self._members[waiting.number] = waiting
        self.waiting_tokens += tokens
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
        """The caller went away: out of the queue, or out of the place it was just given."""
        if waiting.number in self._members:
            self._forget(waiting)
            self._let_in()
        elif waiting.turn.done() and not waiting.turn.cancelled():
            self.leave(waiting.tokens)

    def _let_in(self) -> None:
        while (waiting := self._first()) is not None and self._fits(waiting.tokens):
            self._forget(waiting)
            if waiting.turn.done():
                continue  # cancelled in this very moment
            self._admit(waiting.tokens)
            waiting.turn.set_result(None)

    def _first(self) -> _Waiting | None:
        """Who goes next."""
        while self._heap and self._heap[0].number not in self._members:
            heapq.heappop(self._heap)
        return self._heap[0] if self._heap else None

    def _forget(self, waiting: _Waiting) -> None:
        """It waits no more. Nobody looks through the heap for it: thousands may leave together."""
        del self._members[waiting.number]
        self.waiting_tokens -= waiting.tokens
        if len(self._heap) > 2 * len(self._members) + SLACK:
            self._heap = [each for each in self._heap if each.number in self._members]
            heapq.heapify(self._heap)

    def _refused(self, reason: RejectReason, message: str) -> AdmissionRefused:
        self._counter.rejected(reason)
        share = self.num_waiting / max(1, self.limits.max_queued_requests)
        retry_after = 1.0 + share * min(self.limits.max_queue_age, 30.0)
        return AdmissionRefused(reason, f"the router is full: {message}", retry_after)
