"""The queue of requests without blocks: new ones and preempted ones, best order first; and those
that wait beside it for their KV.

By (priority, arrival, choice); under FCFS every priority is the same. A preempted request comes
back to the place that its arrival gives it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from tandem.engine.request import Order, Request
from tandem.engine.step import SeqId

SLACK = 64
"""Discarded entries that a heap may keep beside as many as it has members."""


class WaitingQueue:
    """A heap with removal: what was discarded is skipped when it comes up. Its entries hold no
    request, so that who is gone takes prompt and vectors along."""

    def __init__(self, *, keeps: bool = False) -> None:
        """``keeps``: what a member has computed before is mostly found again, in the cache."""
        self._keeps = keeps
        self._heap: list[tuple[Order, SeqId]] = []
        self._members: dict[SeqId, tuple[Request, int, bool]] = {}
        """With the tokens that each was counted with, and whether it is a new request."""
        self._num_tokens = 0
        self.num_new = 0
        """Requests none of whose sequences was in a step yet."""
        self.num_new_tokens = 0
        """Tokens of those."""

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, request: Request) -> bool:
        return request.seq in self._members

    @property
    def num_tokens(self) -> int:
        """Tokens that all members have to compute: of one that comes back, and of further choices,
        those that no cache keeps."""
        return self._num_tokens

    def push(self, request: Request) -> None:
        """Add a request at its place."""
        assert request.seq not in self._members, f"{request} waits twice"
        count = len(request.token_ids)
        is_new = request.num_preemptions == 0 and request.leads
        if is_new:
            self.num_new += 1
            self.num_new_tokens += count
        elif self._keeps:
            count -= count if request.num_preemptions else request.num_prompt
        self._members[request.seq] = request, count, is_new
        self._num_tokens += count
        heapq.heappush(self._heap, (request.order, request.seq))

    def peek(self) -> Request | None:
        """The request that goes first, or None."""
        while self._heap:
            member = self._members.get(self._heap[0][1])
            if member is not None:
                return member[0]
            heapq.heappop(self._heap)
        return None

    def pop(self) -> Request:
        """Remove and return the request that goes first."""
        request = self.peek()
        assert request is not None, "pop from an empty queue"
        heapq.heappop(self._heap)
        self._forget(request)
        return request

    def in_order(self) -> Iterator[Request]:
        """Members, the one that goes first at first. Costs by what is read of it; nothing may be
        pushed or popped meanwhile."""
        heap = self._heap
        front = [(heap[0][0], 0)] if heap else []
        while front:
            _, at = heapq.heappop(front)
            member = self._members.get(heap[at][1])
            if member is not None:
                yield member[0]
            for child in (2 * at + 1, 2 * at + 2):
                if child < len(heap):
                    heapq.heappush(front, (heap[child][0], child))

    def discard(self, request: Request) -> None:
        """Remove a member, wherever it is; it never comes back."""
        if request.seq in self._members:
            self._forget(request)

    def _forget(self, request: Request) -> None:
        _, count, is_new = self._members.pop(request.seq)
        self._num_tokens -= count
        if is_new:
            self.num_new -= 1
            self.num_new_tokens -= count
        if len(self._heap) > 2 * len(self._members) + SLACK:
            # A new list: whoever reads in order goes on with the old one.
            self._heap = [each for each in self._heap if each[1] in self._members]
            heapq.heapify(self._heap)


class Parked:
    """Requests that wait outside the queue until their KV comes, or may be computed, in no
    order."""

    def __init__(self) -> None:
        self._coming: dict[SeqId, bool] = {}
        """With whether its KV is to come."""
        self.num_tokens = 0
        """Tokens of all of them that were known when they came."""
        self.num_coming = 0
        """Tokens of those whose KV is to come."""

    def __len__(self) -> int:
        return len(self._coming)

    def add(self, request: Request, *, comes: bool) -> None:
        """Park a request; ``comes``: its KV is to come, otherwise it may not start yet."""
        assert request.seq not in self._coming, f"{request} is parked twice"
        self._coming[request.seq] = comes
        self.num_tokens += request.num_prefill
        self.num_coming += request.num_prefill * comes

    def discard(self, request: Request) -> None:
        """Let a request go, if it is here."""
        comes = self._coming.pop(request.seq, None)
        if comes is not None:
            self.num_tokens -= request.num_prefill
            self.num_coming -= request.num_prefill * comes
