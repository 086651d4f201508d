"""The queue of requests without blocks, new and preempted, best order first; and the requests
parked outside it for their KV.

Order: (priority, turn of the tenant, arrival, choice); under FCFS every priority is the same. A
preempted request returns to the place of its arrival. The planner may have some tenants go first,
or skip some, for a step.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Set
from dataclasses import dataclass, field

from tandem.engine.request import Order, Request
from tandem.engine.step import SeqId

SLACK = 64
"""Discarded entries that a heap may keep in addition to one for each member."""


_Entry = tuple[Order, SeqId]


@dataclass(slots=True)
class _Heap:
    """Requests of one tenant."""

    entries: list[_Entry] = field(default_factory=list)
    count: int = 0
    """Members; other entries are of requests that left."""
    tokens: int = 0
    """Tokens that the members have to compute."""


class WaitingQueue:
    """A heap with removal for each tenant: discarded entries are skipped when they come up. Entries
    hold no request, so that a removed request's prompt and vectors are freed."""

    def __init__(self, *, keeps: bool = False) -> None:
        """``keeps``: tokens that a member has computed before are mostly in the prefix cache."""
        self._keeps = keeps
        self._heaps: dict[str, _Heap] = {}
        self.first_tenants: Set[str] = frozenset()
        """Tenants whose requests go before those of other tenants of the same priority."""
        self.passed_over: Set[str] = frozenset()
        """Tenants whose requests wait for the next step."""
        self._members: dict[SeqId, tuple[Request, int, bool]] = {}
        """Each with its counted tokens, and whether it is a new request."""
        self._num_tokens = 0
        self.num_new = 0
        """Requests with no sequence that was in a step."""
        self.num_new_tokens = 0
        """Tokens of those."""

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, request: Request) -> bool:
        return request.seq in self._members

    @property
    def num_tokens(self) -> int:
        """Return the tokens that all members have to compute. Preempted requests and further
        choices count only the tokens that no cache keeps."""
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
        heap = self._heaps.setdefault(request.tenant, _Heap())
        heap.count += 1
        heap.tokens += count
        heapq.heappush(heap.entries, (request.order, request.seq))

    def peek(self) -> Request | None:
        """Return the request that goes first, or None."""
        if len(self._heaps) == 1:
            ((tenant, heap),) = self._heaps.items()
            return None if tenant in self.passed_over else self._first(heap)
        firsts = [
            first
            for tenant, heap in self._heaps.items()
            if tenant not in self.passed_over and (first := self._first(heap)) is not None
        ]
        return min(firsts, key=self._place_of, default=None)

    def wanted(self) -> Iterator[tuple[str, int, Request]]:
        """Yield each tenant with requests here, their tokens (at least one each), and its first
        request."""
        for tenant, heap in self._heaps.items():
            first = self._first(heap)
            if first is not None:
                yield tenant, max(heap.tokens, heap.count), first

    def _place_of(self, request: Request) -> tuple[int, bool, Order]:
        return request.order[0], request.tenant not in self.first_tenants, request.order

    def _first(self, heap: _Heap) -> Request | None:
        entries = heap.entries
        while entries:
            member = self._members.get(entries[0][1])
            if member is not None:
                return member[0]
            heapq.heappop(entries)
        return None

    def pop(self) -> Request:
        """Remove and return the request that goes first."""
        request = self.peek()
        assert request is not None, "pop from an empty queue"
        heapq.heappop(self._heaps[request.tenant].entries)
        self._forget(request)
        return request

    def in_order(self) -> Iterator[Request]:
        """Yield members in their order, whichever tenants go first now. Costs by the number read;
        nothing may be pushed or popped meanwhile."""
        heaps = [self._ordered(each.entries) for each in self._heaps.values()]
        if len(heaps) == 1:
            return heaps[0]
        return heapq.merge(*heaps, key=lambda each: each.order)

    def _ordered(self, heap: list[_Entry]) -> Iterator[Request]:
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
        heap = self._heaps[request.tenant]
        heap.count -= 1
        heap.tokens -= count
        self._num_tokens -= count
        if is_new:
            self.num_new -= 1
            self.num_new_tokens -= count
        if not heap.count:
            del self._heaps[request.tenant]
        elif len(heap.entries) > 2 * heap.count + SLACK:
            # A new list: whoever reads in order goes on with the old one.
            heap.entries = [each for each in heap.entries if each[1] in self._members]
            heapq.heapify(heap.entries)


class Parked:
    """Requests that wait outside the queue until their KV comes, or may be computed, in no
    order."""

    def __init__(self) -> None:
        self._coming: dict[SeqId, bool] = {}
        """Parked requests, True if their KV is to come."""
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
        """Remove a request, if it is here."""
        comes = self._coming.pop(request.seq, None)
        if comes is not None:
            self.num_tokens -= request.num_prefill
            self.num_coming -= request.num_prefill * comes
