"""Share seats, blocks, and the prompt tokens of a step between the tenants of one engine.

Requests go in the order of their tags (``protocol/fair_order``). A tenant that holds less than an
equal part of seats and blocks goes before those that hold more. If it stays within its part, it
takes a seat or blocks from the one that holds most, whose last sequence is preempted. A request
beyond its tenant's part waits for room: two such tenants would preempt each other forever. If only
one tenant is here, nothing is looked at. The planner asks once a step; a hand-off whose KV comes
has its turn in ``turns``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from tandem.engine.request import Request
from tandem.engine.scheduler.roster import Roster
from tandem.protocol.layout import blocks_for


class Shares:
    """Shares of several tenants in one step."""

    def __init__(self, roster: Roster, max_num_seqs: int) -> None:
        self._roster = roster
        self._num_seats = max_num_seqs
        tenants = len(roster.tenants)
        self._seats = max_num_seqs // tenants
        self._blocks = roster.manager.pool.num_blocks // tenants
        self._held_seats: Counter[str] = Counter()
        self._held_blocks: Counter[str] = Counter()
        for request in (*roster.running, *roster.loading.values()):
            self._held_seats[request.tenant] += 1
            self._held_blocks[request.tenant] += len(request.block_ids)

    def below(self) -> frozenset[str]:
        """Return the tenants that hold less than their part of everything."""
        return frozenset(
            each
            for each in self._roster.tenants
            if self._held_seats[each] < self._seats and self._held_blocks[each] < self._blocks
        )

    def last_of_largest(self, needs: Request) -> Request | None:
        """Return the sequence that makes room for a request that waits: the last one of the tenant
        that holds most, if that is more than its part.

        Each is preempted for another tenant once at most, so all requests end.
        """
        need = blocks_for(len(needs.token_ids), self._roster.manager.block_size)
        if self._held_blocks[needs.tenant] + need > self._blocks:
            return None
        over = {
            each: max(seats / max(1, self._seats), self._held_blocks[each] / max(1, self._blocks))
            for each, seats in self._held_seats.items()
            if each != needs.tenant
        }
        largest = max(over, key=over.__getitem__, default="")
        if over.get(largest, 0.0) <= 1.0:
            return None
        for each in reversed(self._roster.running):
            spared = each.preempted_for_tenant or not each.preemptible
            if each.tenant == largest and not spared:
                return each
        return None

    def left(self, request: Request) -> None:
        """Count a sequence that is about to lose its seat and its blocks."""
        self._held_seats[request.tenant] -= 1
        self._held_blocks[request.tenant] -= len(request.block_ids)

    def prompt_parts(self, running: Iterable[Request], budget: int) -> dict[str, int]:
        """Return the prompt tokens that each tenant may have computed in a step of ``budget``: an
        equal part, and the unused rest of other tenants' parts."""
        wanted: Counter[str] = Counter()
        manager = self._roster.manager
        for request in running:
            wanted[request.tenant] += request.num_uncomputed
        may_start = self._held_seats.total() < self._num_seats
        for tenant, tokens, first in self._roster.waiting.wanted():
            if may_start:
                hits = manager.find_cached_prefix(first, first.max_cached_tokens)
                wanted[tenant] += max(1, tokens - len(hits) * manager.block_size)
        parts: dict[str, int] = {}
        for number, (tenant, tokens) in enumerate(sorted(wanted.items(), key=lambda each: each[1])):
            parts[tenant] = min(tokens, budget // (len(wanted) - number))
            budget -= parts[tenant]
        return parts
