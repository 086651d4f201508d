"""State of one key at D, the events of its state machine, and its deadlines and endings. Pure."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

import msgspec

from tandem.kvtransfer.handoff.actions import Action, EmitEvent, Millis, Quarantine, Send
from tandem.kvtransfer.handoff.form import Form
from tandem.kvtransfer.handoff.manifest import Group, Item, available, is_complete
from tandem.kvtransfer.handoff.messages import (
    Committed,
    Done,
    Final,
    Gone,
    GoneReason,
    Part,
    Ready,
)
from tandem.kvtransfer.handoff.tables import DEvent, DState
from tandem.protocol.errors import FailCause
from tandem.protocol.ids import BlockHash, Incarnation, RequestKey
from tandem.protocol.kv import BlockTables, Loaded, LoadFailed


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


_MESSAGE_EVENT = {
    Ready: DEvent.READY,
    Part: DEvent.PART,
    Final: DEvent.FINAL,
    Committed: DEvent.COMMITTED,
    Gone: DEvent.GONE,
}


class ConsumerPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and times of all pulls."""

    block_size: int
    groups: tuple[Group, ...]
    """Groups of the layout, which a manifest must match."""
    header_bytes: int
    credits: int
    transfer_ms: int
    commit_ms: int
    tombstone_ms: int
    wait_ms: int


class Flight(msgspec.Struct, frozen=True):
    """A part from its PART (of a copy: from READY) to its unpacking."""

    index: int
    start: int
    stop: int
    remote_slot: int | None
    """None for a copy."""
    nbytes: int
    slot: int | None = None
    """Receive slot, once there is one; None for a copy."""
    group: int = 0
    remote_blocks: tuple[int, ...] = ()


class UncertainRead(msgspec.Struct, frozen=True):
    """Fault of a part: its identity or its digest."""

    cause: FailCause
    message: str


class Pull(msgspec.Struct, frozen=True, kw_only=True):
    """D's state of one key."""

    key: RequestKey
    state: DState
    producer: Incarnation
    budget: Millis
    deadline: Millis
    """Nearest of the state's deadlines."""
    direct: bool = False
    """Whether P's blocks are copied into D's, without slots."""
    form: Form | None = None
    """Form of the parts or copies; None is D's own blocks unchanged."""
    num_tokens: int | None = None
    """Known from the first READY."""
    upto: int = 0
    items: tuple[Item, ...] = ()
    remote: tuple[tuple[int, ...], ...] = ()
    """P's announced blocks by item, from its start, for copies."""
    final: Final | None = None
    tables: BlockTables = ()
    start: int | None = None
    """First required token; None before ``begin_load``."""
    cut: tuple[int, ...] = ()
    """Tokens up to which parts have been announced, or copies cut, by item."""
    next_index: int = 0
    queued: tuple[Flight, ...] = ()
    """Parts that wait for a slot, oldest first."""
    reading: tuple[Flight, ...] = ()
    unpacking: tuple[Flight, ...] = ()
    uncertain: UncertainRead | None = None
    """Fault of a part while FAILING, until P answers whether its lease held."""
    reached: tuple[int, ...] = ()
    """Progress by item: its first token plus the tokens verified in D's blocks."""

    @property
    def waiting(self) -> int:
        """Return the announced tokens that are not in D's blocks, of the item that is last."""
        return max(0, self.upto - min(self.reached, default=0))


class Opened(msgspec.Struct, frozen=True):
    """The engine accepted the request."""

    key: RequestKey
    producer: Incarnation
    budget_ms: int | None
    link_up: bool
    direct: bool = False
    form: Form | None = None
    """Form of the link's parts or copies, if not D's own blocks."""
    hashes: tuple[BlockHash, ...] = ()
    """Hashes of the leading blocks to pull from the peer's cache, if any."""
    kind = DEvent.OPEN


class Load(msgspec.Struct, frozen=True):
    """Blocks are reserved for tokens ``[from_token, to_token)``."""

    key: RequestKey
    tables: BlockTables
    from_token: int
    to_token: int
    kind = DEvent.LOAD


class PeerMessage(msgspec.Struct, frozen=True):
    """A message of P."""

    key: RequestKey
    source: Incarnation
    message: Ready | Part | Final | Committed | Gone

    @property
    def kind(self) -> DEvent:
        return _MESSAGE_EVENT[type(self.message)]


class Granted(msgspec.Struct, frozen=True):
    """A free receive slot for the oldest queued part, or None for a copy."""

    key: RequestKey
    slot: int | None
    kind = DEvent.SLOT


class ReadDone(msgspec.Struct, frozen=True):
    """All bytes of a part are in its receive slot, or in D's blocks."""

    key: RequestKey
    index: int
    kind = DEvent.READ_DONE


class ReadFailed(msgspec.Struct, frozen=True):
    """The transport gave up; no bytes arrive any more."""

    key: RequestKey
    index: int
    message: str
    cause: FailCause = FailCause.PEER
    kind = DEvent.READ_FAILED


class Unpacked(msgspec.Struct, frozen=True):
    """A part was verified and is in D's blocks; or ``fault`` is set."""

    key: RequestKey
    index: int
    fault: FailCause | None = None
    message: str = ""
    kind = DEvent.UNPACKED


class Cancel(msgspec.Struct, frozen=True):
    """The router or the engine cancelled the pull."""

    key: RequestKey
    kind = DEvent.CANCEL


class LinkLost(msgspec.Struct, frozen=True):
    """The link to the producer broke."""

    key: RequestKey
    reason: str
    kind = DEvent.LINK_LOST


class Timeout(msgspec.Struct, frozen=True):
    """``deadline`` has passed."""

    key: RequestKey
    kind = DEvent.TIMEOUT


Event = (
    Opened
    | Load
    | PeerMessage
    | Granted
    | ReadDone
    | ReadFailed
    | Unpacked
    | Cancel
    | LinkLost
    | Timeout
)


Result = tuple[Pull | None, list[Action]]

BY_TIME = (GoneReason.UNKNOWN, GoneReason.EXPIRED)
"""Reasons of P after its own deadline. After D's budget they are not P's fault: D may have checked
its clock late."""

_replace = msgspec.structs.replace


def armed(pull: Pull, now: Millis, policy: ConsumerPolicy) -> Pull:
    """Return the pull with its next deadline: its budget, or earlier while P or the transport must
    make progress."""
    deadline = pull.budget
    if pull.state is DState.COMMITTING:
        deadline = min(deadline, Millis(now + policy.commit_ms))
    elif pull.state is DState.PULLING and is_due(pull, policy):
        deadline = min(deadline, Millis(now + policy.transfer_ms))
    return pull if deadline == pull.deadline else _replace(pull, deadline=deadline)


def is_due(pull: Pull, policy: ConsumerPolicy) -> bool:
    """Return whether P or the transport owes announced parts, or FINAL after the last."""
    assert pull.start is not None
    if pull.num_tokens is None or pull.upto == pull.num_tokens:
        return True
    size = (pull.form or policy).block_size
    for item in pull.items:  # a loop, as this runs for each part
        upto = available(item, pull.upto, pull.num_tokens, size)
        if pull.reached[item.group] < upto:
            return True
    return False


def close(
    pull: Pull,
    now: Millis,
    policy: ConsumerPolicy,
    ending: Callable[[bool], EmitEvent],
    *,
    notify: bool,
) -> Result:
    """End without success: abandon the key, quarantine slots being read, report to the engine."""
    actions: list[Action] = []
    if notify:
        actions.append(Send(pull.producer, Done(pull.key, ok=False)))
    copying, unread = _given_up(pull)
    actions += unread
    blocks_free = not (pull.unpacking or copying)
    actions.append(ending(blocks_free))
    closed = _replace(
        pull,
        state=DState.CLOSED if blocks_free else DState.FAILING,
        queued=(),
        reading=copying,
        deadline=Millis(now + policy.tombstone_ms),
    )
    return closed, actions


def _given_up(pull: Pull) -> tuple[tuple[Flight, ...], list[Action]]:
    copying = tuple(each for each in pull.reading if each.slot is None)
    return copying, [Quarantine(each.slot) for each in pull.reading if each.slot is not None]


def fail(
    pull: Pull,
    cause: FailCause,
    message: str,
    now: Millis,
    policy: ConsumerPolicy,
    *,
    notify: bool = True,
) -> Result:
    """End by a fault."""

    def ending(blocks_free: bool) -> EmitEvent:
        return EmitEvent(LoadFailed(pull.key, cause, message, blocks_free))

    return close(pull, now, policy, ending, notify=notify)


def fail_uncertain(
    pull: Pull, uncertain: UncertainRead, now: Millis, policy: ConsumerPolicy
) -> Result:
    """Fail the pull without using the data. P's answer about its lease decides whether the link is
    at fault."""
    done = Send(pull.producer, Done(pull.key, ok=False))
    copying, unread = _given_up(pull)
    failing = _replace(
        pull,
        state=DState.FAILING,
        queued=(),
        reading=copying,
        uncertain=uncertain,
        deadline=min(pull.budget, Millis(now + policy.commit_ms)),
    )
    return failing, [done, *unread]


def settled(
    pull: Pull, ending: Callable[[bool], EmitEvent], now: Millis, policy: ConsumerPolicy
) -> Result:
    """Report the ending after P's answer; blocks are free after the last copy."""
    free = not (pull.reading or pull.unpacking)
    settled = _replace(
        pull,
        state=DState.CLOSED if free else DState.FAILING,
        uncertain=None,
        deadline=Millis(now + policy.tombstone_ms),
    )
    return settled, [ending(free)]


def first_token_ended(
    pull: Pull, final: Final, finish: str, now: Millis, policy: ConsumerPolicy
) -> Result:
    """End because token 1 was the last: no KV is needed."""

    def ending(blocks_free: bool) -> EmitEvent:
        return EmitEvent(Loaded(pull.key, final.first, usable=False, blocks_free=blocks_free))

    return close(pull, now, policy, ending, notify=True)


def loaded(pull: Pull, now: Millis, policy: ConsumerPolicy) -> tuple[Pull, EmitEvent]:
    """End well."""
    assert pull.final is not None
    closed = _replace(pull, state=DState.CLOSED, deadline=Millis(now + policy.tombstone_ms))
    return closed, EmitEvent(Loaded(pull.key, pull.final.first))


def done_if_complete(
    pull: Pull, now: Millis, policy: ConsumerPolicy, actions: list[Action]
) -> Result:
    """Commit or load a PULLING pull if it is complete, else set its deadline again."""
    assert pull.start is not None
    if pull.final is not None and pull.num_tokens is not None:
        if pull.start == pull.num_tokens:
            closed, ended = loaded(pull, now, policy)
            return closed, [*actions, Send(pull.producer, Done(pull.key, ok=False)), ended]
        if is_complete(pull.items, pull.reached):
            if pull.direct:  # each tag matched right after its copy, so P is not asked
                closed, ended = loaded(pull, now, policy)
                return closed, [*actions, ended, Send(pull.producer, Done(pull.key, ok=True))]
            committing = _replace(pull, state=DState.COMMITTING)
            actions.append(Send(pull.producer, Done(pull.key, ok=True)))
            return armed(committing, now, policy), actions
    return armed(pull, now, policy), actions
