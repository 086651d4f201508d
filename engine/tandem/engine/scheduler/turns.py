"""Whose turn it is for blocks and seats, over the waiting queue and the hand-offs together.

A request that waits (new, or preempted) and a hand-off that is ready want the same blocks. What
came earlier goes first, whichever of the two it is: a later hand-off leaves what those before it
in the queue need, and whoever is behind a hand-off that found no room waits, too. A hand-off whose
KV has not been announced holds up nobody. ``RemoteKV`` makes one per step; the planner asks it
before it starts anybody.
"""

from __future__ import annotations

from collections.abc import Sequence

from tandem.engine.request import Order, Request
from tandem.engine.scheduler.roster import Roster
from tandem.protocol.layout import blocks_for


class Turns:
    """One step's look: ask for hand-offs in order, then for waiting requests."""

    def __init__(self, roster: Roster, max_num_seqs: int) -> None:
        self._roster = roster
        self._max_num_seqs = max_num_seqs
        self._queue = roster.waiting.in_order()
        self._next = next(self._queue, None)
        self._blocks = 0
        """Blocks that requests in the queue need which came before the hand-off looked at last."""
        self._seats = 0
        """Seats, likewise."""
        self._short: Order | None = None
        """The first hand-off that found no room."""

    def may_reserve(self, request: Request, hits: Sequence[int], count: int, extra: int) -> bool:
        """Whether a hand-off that is ready finds ``count`` tokens and ``extra`` blocks and a seat
        beside all that goes before it. After the first no, every later one gets it, too."""
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
        """Whether no hand-off goes before this one of the queue and found no room."""
        return self._short is None or request.order < self._short

    @property
    def _free_seats(self) -> int:
        roster = self._roster
        return self._max_num_seqs - len(roster.running) - len(roster.loading)

    def _claim_before(self, order: Order) -> None:
        """Count what the queue needs up to ``order``, no further than it matters."""
        manager = self._roster.manager
        while self._next is not None and self._next.order < order:
            if self._seats >= self._free_seats or self._blocks > manager.num_free:
                return
            self._seats += 1
            self._blocks += blocks_for(len(self._next.token_ids), manager.block_size)
            self._next = next(self._queue, None)
