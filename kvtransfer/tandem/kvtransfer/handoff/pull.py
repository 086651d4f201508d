"""State of one key at D, and the events of its state machine."""

from __future__ import annotations

import msgspec

from tandem.kvtransfer.handoff.actions import Millis
from tandem.kvtransfer.handoff.form import Form
from tandem.kvtransfer.handoff.manifest import Group, Item, begin
from tandem.kvtransfer.handoff.messages import Committed, Final, Gone, Part, Ready
from tandem.kvtransfer.handoff.tables import DEvent, DState
from tandem.protocol.errors import FailCause
from tandem.protocol.ids import BlockHash, Incarnation, RequestKey

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
    tables: tuple[tuple[int, ...], ...] = ()
    start: int | None = None
    """First required token; None before ``begin_load``."""
    cut: tuple[int, ...] = ()
    """Tokens up to which parts have been announced, or copies cut, by item."""
    next_index: int = 0
    queued: tuple[Flight, ...] = ()
    """Parts that wait for a slot, oldest first."""
    reading: tuple[Flight, ...] = ()
    unpacking: tuple[Flight, ...] = ()
    doubt: UncertainRead | None = None
    """Fault of a part while FAILING, until P answers whether its lease held."""
    reached: tuple[int, ...] = ()
    """Progress by item: its first token plus the tokens verified in D's blocks."""

    @property
    def unpacked(self) -> int:
        return self.reached[0] - begin(self.items[0], self.start or 0) if self.reached else 0


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
    tables: tuple[tuple[int, ...], ...]
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
