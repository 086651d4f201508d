"""D's pulls by key, the receive slots they share, and their deadlines. Pure.

Owned by the transfer thread. Slots are granted to queued parts, those of the oldest key first. A
slot whose read was given up is quarantined until ``read_ended``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import ClassVar

from tandem.kvtransfer.handoff import pull as d_events
from tandem.kvtransfer.handoff.actions import Action, Free, Millis, Quarantine
from tandem.kvtransfer.handoff.consumer import step
from tandem.kvtransfer.handoff.messages import Ready
from tandem.kvtransfer.handoff.pull import (
    ConsumerPolicy,
    Granted,
    Pull,
    Result,
    SlotRing,
    SlotState,
)
from tandem.kvtransfer.handoff.tables import DState
from tandem.kvtransfer.handoff.timers import Age, Timers
from tandem.protocol.errors import FailCause
from tandem.protocol.ids import Incarnation, RequestKey

MAX_TOMBSTONES = 65536
_OVER = (DState.CLOSED, DState.FAILING)
"""States in which nothing more is requested of the producer."""


class ImportTable:
    """D's keys; for the transfer thread only."""

    machine: ClassVar[Callable[..., Result]] = staticmethod(step)

    def __init__(
        self, policy: ConsumerPolicy, ring: SlotRing, *, max_tombstones: int = MAX_TOMBSTONES
    ) -> None:
        self.policy = policy
        self.ring = ring
        self.links: set[Incarnation] = set()
        self.pulls: dict[RequestKey, Pull] = {}
        self._max_tombstones = max_tombstones
        self._hungry: dict[RequestKey, None] = {}
        self._age = Age()
        self._closed: dict[RequestKey, None] = {}
        self._open_with: Counter[Incarnation] = Counter()
        self._timers = Timers()
        self._has_direct = False
        """Whether parts of some pull need no slot."""

    def apply(self, event: d_events.Event, now: Millis) -> list[Action]:
        actions = self._step(event, now)
        self._feed(actions, now)
        return actions

    def read_ended(
        self, slot: int, now: Millis, fault: FailCause | None = None, message: str = ""
    ) -> list[Action]:
        """Handle the end of a read into a slot. With ``fault`` its bytes will never arrive."""
        held = self.ring[slot]
        assert held.key is not None
        if held.state is SlotState.QUARANTINED:
            return self.give_back(slot, now)
        if fault is None:
            return self.apply(d_events.ReadDone(held.key, held.index), now)
        return self.apply(d_events.ReadFailed(held.key, held.index, message, fault), now)

    def copy_ended(
        self,
        key: RequestKey,
        index: int,
        now: Millis,
        fault: FailCause | None = None,
        message: str = "",
    ) -> list[Action]:
        """Handle the end of a copy of a part into D's blocks, as ``read_ended`` does for slots."""
        if fault is None:
            return self.apply(d_events.ReadDone(key, index), now)
        return self.apply(d_events.ReadFailed(key, index, message, fault), now)

    def give_back(self, slot: int, now: Millis) -> list[Action]:
        """Free a slot that was taken from the ring outside a pull."""
        self.ring.give(slot)
        actions: list[Action] = []
        self._feed(actions, now)
        return actions

    def is_news(self, message: Ready) -> bool:
        """Return whether READY announces more than is known under its key."""
        pull = self.pulls.get(message.key)
        return pull is None or pull.num_tokens is None or message.upto > pull.upto

    def link_up(self, peer: Incarnation) -> None:
        self.links.add(peer)

    def link_lost(self, peer: Incarnation, reason: str, now: Millis) -> list[Action]:
        self.links.discard(peer)
        keys = [key for key, each in self.pulls.items() if each.producer == peer]
        return self._apply_all([d_events.LinkLost(key, reason) for key in keys], now)

    def expire(self, now: Millis) -> list[Action]:
        return self._apply_all(
            [d_events.Timeout(key) for key in self._timers.due(now, self._deadline)], now
        )

    def next_deadline(self) -> Millis | None:
        return self._timers.next(self._deadline)

    @property
    def num_open(self) -> int:
        return len(self.pulls) - len(self._closed)

    def is_pulling(self, peer: Incarnation) -> bool:
        """Return whether any key still needs the producer."""
        return peer in self._open_with

    def copy(self) -> ImportTable:
        """Return an independent table in the same state (without deadlines)."""
        other = type(self)(self.policy, self.ring.copy(), max_tombstones=self._max_tombstones)
        other.links = set(self.links)
        other.pulls = dict(self.pulls)
        other._hungry = dict(self._hungry)
        other._age = self._age.copy()
        other._closed = dict(self._closed)
        other._open_with = self._open_with.copy()
        other._has_direct = self._has_direct
        return other

    def _apply_all(self, each: list[d_events.Event], now: Millis) -> list[Action]:
        actions = [action for event in each for action in self._step(event, now)]
        self._feed(actions, now)
        return actions

    def _step(self, event: d_events.Event, now: Millis) -> list[Action]:
        was = self.pulls.get(event.key)
        after, actions = self.machine(was, event, now, self.policy)
        if after is not was:
            self._store(event.key, was, after)
        outside: list[Action] = []
        for action in actions:
            if isinstance(action, Free):
                self.ring.give(action.slot)
            elif isinstance(action, Quarantine):
                self.ring.quarantine(action.slot)
            else:
                outside.append(action)
        return outside

    def _store(self, key: RequestKey, was: Pull | None, after: Pull | None) -> None:
        self._hungry.pop(key, None)
        self._closed.pop(key, None)
        self._count(was, after)
        if after is None:
            self.pulls.pop(key, None)
            self._age.forget(key)
            return
        self.pulls[key] = after
        self._has_direct = self._has_direct or after.direct
        self._age.note(key)
        if was is None or was.deadline != after.deadline:
            self._timers.arm(key, after.deadline)
        if after.queued:
            self._hungry[key] = None
        if after.state is DState.CLOSED:
            self._closed[key] = None
            if len(self._closed) > self._max_tombstones:
                oldest = next(iter(self._closed))
                self._store(oldest, self.pulls[oldest], None)

    def _count(self, was: Pull | None, after: Pull | None) -> None:
        before = was is not None and was.state not in _OVER
        now = after is not None and after.state not in _OVER
        known = after or was
        if known is None or before == now:
            return
        self._open_with[known.producer] += 1 if now else -1
        if not self._open_with[known.producer]:
            del self._open_with[known.producer]

    def _feed(self, actions: list[Action], now: Millis) -> None:
        if not self._hungry or not (self.ring.free or self._has_direct):
            return
        for key in self._age.order(self._hungry):
            while key in self._hungry:
                pull, slot = self.pulls[key], None
                if not pull.direct:
                    if not self.ring.has_room(pull.producer):
                        break
                    slot = self.ring.take(pull.producer, key, pull.queued[0].index)
                actions += self._step(Granted(key, slot), now)

    def _deadline(self, key: RequestKey) -> Millis | None:
        pull = self.pulls.get(key)
        return None if pull is None else pull.deadline
