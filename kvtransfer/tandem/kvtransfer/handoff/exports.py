"""P's exports by key, the send slots they share, and their deadlines. Pure.

Owned by the transfer thread. Slots are granted to the oldest hand-off first, so that some end
early. Ended keys stay as tombstones for a time, at most ``max_tombstones``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from tandem.kvtransfer.handoff import export as p_events
from tandem.kvtransfer.handoff.actions import Action, Count, Free, Millis, Send
from tandem.kvtransfer.handoff.export import ConsumerMessage, Export, Granted, ProducerPolicy
from tandem.kvtransfer.handoff.lease import ENDED, Result, can_cut
from tandem.kvtransfer.handoff.messages import Gone, GoneReason, Open
from tandem.kvtransfer.handoff.producer import step
from tandem.kvtransfer.handoff.pull import SlotRing
from tandem.kvtransfer.handoff.tables import PState
from tandem.kvtransfer.handoff.timers import Age, Timers
from tandem.protocol.ids import Incarnation, RequestKey

MAX_EXPECTED = 4096
MAX_TOMBSTONES = 65536


class ExportTable:
    """P's keys; for the transfer thread only."""

    machine: ClassVar[Callable[..., Result]] = staticmethod(step)

    def __init__(
        self,
        policy: ProducerPolicy,
        ring: SlotRing,
        *,
        max_expected: int = MAX_EXPECTED,
        max_tombstones: int = MAX_TOMBSTONES,
    ) -> None:
        self.policy = policy
        self.ring = ring
        self.links: set[Incarnation] = set()
        self.exports: dict[RequestKey, Export] = {}
        self._max_expected = max_expected
        self._max_tombstones = max_tombstones
        self._hungry: dict[RequestKey, None] = {}
        self._age = Age()
        self._ended: dict[RequestKey, None] = {}
        self._expected: dict[RequestKey, None] = {}
        self._timers = Timers()

    def apply(self, event: p_events.Event, now: Millis) -> list[Action]:
        if isinstance(event, ConsumerMessage) and self._is_one_too_many(event):
            gone = Gone(event.key, GoneReason.UNKNOWN)
            return [Count("p:too many expected"), Send(event.source, gone)]
        actions = self._step(event, now)
        self._feed(actions, now)
        return actions

    def link_up(self, peer: Incarnation) -> None:
        self.links.add(peer)

    def link_lost(self, peer: Incarnation, now: Millis) -> list[Action]:
        self.links.discard(peer)
        keys = [key for key, each in self.exports.items() if each.consumer == peer]
        return self._apply_all([p_events.LinkLost(key) for key in keys], now)

    def expire(self, now: Millis) -> list[Action]:
        return self._apply_all(
            [p_events.Timeout(key) for key in self._timers.due(now, self._deadline)], now
        )

    def next_deadline(self) -> Millis | None:
        return self._timers.next(self._deadline)

    @property
    def num_leased(self) -> int:
        return len(self.exports) - len(self._ended) - len(self._expected)

    @property
    def num_parts_out(self) -> int:
        """Return the send slots that a consumer may be reading: the transport must progress."""
        return len(self.ring) - self.ring.free

    def copy(self) -> ExportTable:
        """Return an independent table in the same state (without deadlines)."""
        other = type(self)(
            self.policy,
            self.ring.copy(),
            max_expected=self._max_expected,
            max_tombstones=self._max_tombstones,
        )
        other.links = set(self.links)
        other.exports = dict(self.exports)
        other._hungry = dict(self._hungry)
        other._age = self._age.copy()
        other._ended = dict(self._ended)
        other._expected = dict(self._expected)
        return other

    def _is_one_too_many(self, event: ConsumerMessage) -> bool:
        return (
            isinstance(event.message, Open)
            and event.key not in self.exports
            and len(self._expected) >= self._max_expected
        )

    def _apply_all(self, each: list[p_events.Event], now: Millis) -> list[Action]:
        actions = [action for event in each for action in self._step(event, now)]
        self._feed(actions, now)
        return actions

    def _step(self, event: p_events.Event, now: Millis) -> list[Action]:
        key = event.key
        was = self.exports.get(key)
        after, actions = self.machine(was, event, now, self.policy)
        if after is not was:
            self._store(key, was, after)
        outside: list[Action] = []
        for action in actions:
            if isinstance(action, Free):
                self.ring.give(action.slot)
            else:
                outside.append(action)
        return outside

    def _store(self, key: RequestKey, was: Export | None, after: Export | None) -> None:
        for index in (self._hungry, self._ended, self._expected):
            if after is None:
                index.pop(key, None)
        if after is None:
            self.exports.pop(key, None)
            self._age.forget(key)
            return
        self.exports[key] = after
        self._age.note(key)
        if was is None or was.deadline != after.deadline:
            self._timers.arm(key, after.deadline)
        _mark(self._expected, key, after.state is PState.EXPECTED)
        _mark(self._hungry, key, can_cut(after, self.policy))
        _mark(self._ended, key, after.state in ENDED)
        if len(self._ended) > self._max_tombstones:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        for key in self._ended:
            export = self.exports[key]
            if not export.engine_holds and not export.out:
                self._store(key, export, None)
                return

    def _feed(self, actions: list[Action], now: Millis) -> None:
        if not self._hungry or not self.ring.free:
            return
        for key in self._age.order(self._hungry):
            while key in self._hungry:
                export = self.exports[key]
                if not self.ring.has_room(export.consumer):
                    break
                slot = self.ring.take(export.consumer, key, export.next_index)
                actions += self._step(Granted(key, slot), now)

    def _deadline(self, key: RequestKey) -> Millis | None:
        export = self.exports.get(key)
        return None if export is None else export.deadline


def _mark(index: dict[RequestKey, None], key: RequestKey, belongs: bool) -> None:
    if belongs:
        index.setdefault(key)
    else:
        index.pop(key, None)
