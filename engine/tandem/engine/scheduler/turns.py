"""Order in which the waiting queue and the hand-offs get blocks and seats.

A waiting request (new, or preempted) and a hand-off that is ready need the same blocks. The earlier
arrival goes first: a later hand-off leaves room for earlier requests in the queue, and no request
after a hand-off without room may start. A hand-off whose KV has not been announced delays no
request. ``RemoteKV`` makes one per step; the planner asks it before it starts a request.
"""

from __future__ import annotations

from collections.abc import Sequence

from tandem.engine.request import Order, Request
from tandem.engine.scheduler.roster import Roster
from tandem.protocol.layout import blocks_for


class Turns:
    """Order of one step: ask for hand-offs in order, then for waiting requests."""

    def __init__(self, roster: Roster, max_num_seqs: int) -> None:
        self._roster = roster
        self._max_num_seqs = max_num_seqs
        self._queue = roster.waiting.in_order()
        self._next = next(self._queue, None)
        self._blocks = 0
        """Blocks for requests in the queue before the last hand-off that was asked for."""
        self._seats = 0
        """Seats, likewise."""
        self._short: Order | None = None
        """Order of the first hand-off that found no room."""

    def may_reserve(self, request: Request, hits: Sequence[int], count: int, extra: int) -> bool:
        """Return whether a ready hand-off finds a seat, room for ``count`` tokens and ``extra``
        blocks next to all before it. After the first False, every later one gets False."""
        if self._short is not None:
            return False
        self._claim_before(request.order)
        roster = self._roster
        claimed = extra + self._blocks
        room = self._seats < self._free_seats and roster.manager.can_start(
            hits, count, extra=claimed, keep_spare=roster.busy
        )
        if not room:
            self._short = request.order
        return room

    def may_start(self, request: Request) -> bool:
        """Return whether no hand-off before this request of the queue is without room."""
        return self._short is None or request.order < self._short

    @property
    def _free_seats(self) -> int:
        roster = self._roster
        return self._max_num_seqs - len(roster.running) - len(roster.loading)

    def _claim_before(self, order: Order) -> None:
        """Count the blocks and seats of the queue up to ``order``, until there are none left."""
        manager = self._roster.manager
        while self._next is not None and self._next.order < order:
            if self._seats >= self._free_seats or self._blocks > manager.num_free:
                return
            self._seats += 1
            self._blocks += blocks_for(len(self._next.token_ids), manager.block_size)
            self._next = next(self._queue, None)
