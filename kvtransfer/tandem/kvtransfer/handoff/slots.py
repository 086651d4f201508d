"""Ring of slots: owners and quarantine. Pure.

Owned by an export table (send slots) or an import table (receive slots). A read that was given up
may still write, as releasing its handle is no fence; its slot is quarantined until the transport
reports its end.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from tandem.protocol.ids import Incarnation, RequestKey


class SlotState(Enum):
    """State of one slot."""

    FREE = "free"
    HELD = "held"
    QUARANTINED = "quarantined"


class Slot(msgspec.Struct, frozen=True):
    """One slot and its user."""

    state: SlotState = SlotState.FREE
    peer: Incarnation | None = None
    key: RequestKey | None = None
    index: int = 0


FREE = Slot()


class SlotRing:
    """``count`` slots, of which one peer may hold ``per_peer``, quarantined ones included."""

    def __init__(self, count: int, per_peer: int) -> None:
        self._slots = [FREE] * count
        self._free = list(range(count - 1, -1, -1))
        self._held: dict[Incarnation, int] = {}
        self._quarantined = 0
        self.per_peer = min(per_peer, count)

    def __len__(self) -> int:
        return len(self._slots)

    def __getitem__(self, slot: int) -> Slot:
        return self._slots[slot]

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def quarantined(self) -> int:
        """Return the number of slots that wait for a transfer that was given up."""
        return self._quarantined

    def has_room(self, peer: Incarnation) -> bool:
        return bool(self._free) and self._held.get(peer, 0) < self.per_peer

    def take(self, peer: Incarnation, key: RequestKey, index: int) -> int:
        """Return a free slot; requires ``has_room``."""
        assert self.has_room(peer), "no slot to take"
        slot = self._free.pop()
        self._slots[slot] = Slot(SlotState.HELD, peer, key, index)
        self._held[peer] = self._held.get(peer, 0) + 1
        return slot

    def give(self, slot: int) -> None:
        """Free a held slot, or a quarantined one whose transfer is terminal."""
        was = self._slots[slot]
        assert was.state is not SlotState.FREE, f"slot {slot} is given back twice"
        assert was.peer is not None
        if was.state is SlotState.QUARANTINED:
            self._quarantined -= 1
        self._slots[slot] = FREE
        self._free.append(slot)
        left = self._held[was.peer] - 1
        if left:
            self._held[was.peer] = left
        else:
            del self._held[was.peer]

    def quarantine(self, slot: int) -> None:
        """Withhold a held slot until its transfer is terminal."""
        was = self._slots[slot]
        assert was.state is SlotState.HELD, f"slot {slot} is {was.state.value}, not held"
        self._slots[slot] = msgspec.structs.replace(was, state=SlotState.QUARANTINED)
        self._quarantined += 1

    def copy(self) -> SlotRing:
        other = type(self)(0, 0)
        other._slots = list(self._slots)
        other._free = list(self._free)
        other._held = dict(self._held)
        other._quarantined = self._quarantined
        other.per_peer = self.per_peer
        return other

    def snapshot(self) -> tuple[object, ...]:
        """Return a hashable value, equal for rings that behave alike."""
        return (*self._slots, *self._free)
