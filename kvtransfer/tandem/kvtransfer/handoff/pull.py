"""D's state of one key and the events of its machine."""

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
    """Sizes and times that hold for every pull."""

    block_size: int
    """Tokens per block."""
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
    """None of a copy."""
    nbytes: int
    slot: int | None = None
    """Receive slot, once there is one; a copy into blocks gets none."""
    group: int = 0
    remote_blocks: tuple[int, ...] = ()


class UncertainRead(msgspec.Struct, frozen=True):
    """Fault of a part: its identity or its digest."""

    cause: FailCause
    message: str


class Pull(msgspec.Struct, frozen=True, kw_only=True):
    """All that D knows of one key."""

    key: RequestKey
    state: DState
    producer: Incarnation
    budget: Millis
    """Deadline of the request itself."""
    deadline: Millis
    """The nearest of the state's deadlines."""
    direct: bool = False
    """P's blocks are copied into D's: parts are cut here, and need no slot."""
    form: Form | None = None
    """Form in which parts or copies are cut; None is D's own blocks unchanged."""
    num_tokens: int | None = None
    """Known from the first READY."""
    upto: int = 0
    items: tuple[Item, ...] = ()
    """The manifest."""
    remote: tuple[tuple[int, ...], ...] = ()
    """P's blocks by item, from its start on, as far as they were announced; of copies."""
    final: Final | None = None
    tables: tuple[tuple[int, ...], ...] = ()
    """Block tables by group."""
    start: int | None = None
    """First token wanted; None before ``begin_load``."""
    cut: tuple[int, ...] = ()
    """Tokens up to which parts have been announced, or copies cut, by item."""
    next_index: int = 0
    queued: tuple[Flight, ...] = ()
    """Parts that wait for a slot, oldest first."""
    reading: tuple[Flight, ...] = ()
    unpacking: tuple[Flight, ...] = ()
    doubt: UncertainRead | None = None
    """Fault of a part while FAILING: P has not answered yet whether its lease held."""
    reached: tuple[int, ...] = ()
    """Progress by item: its first token plus the tokens verified in D's blocks."""

    @property
    def unpacked(self) -> int:
        """Return the received tokens of the first item."""
        return self.reached[0] - begin(self.items[0], self.start or 0) if self.reached else 0


class Opened(msgspec.Struct, frozen=True):
    """The engine accepted the request."""

    key: RequestKey
    producer: Incarnation
    budget_ms: int | None
    link_up: bool
    direct: bool = False
    """The link's transport copies blocks into blocks."""
    form: Form | None = None
    """Form of the link's parts or copies, if it is not D's own blocks."""
    hashes: tuple[BlockHash, ...] = ()
    """Hashes of the leading blocks to pull from the peer's cache, if it computes nothing for D."""
    kind = DEvent.OPEN


class Load(msgspec.Struct, frozen=True):
    """Blocks are reserved; ``[from_token, to_token)`` is wanted."""

    key: RequestKey
    tables: tuple[tuple[int, ...], ...]
    """Block tables by group."""
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
        """Return the event of the table."""
        return _MESSAGE_EVENT[type(self.message)]


class Granted(msgspec.Struct, frozen=True):
    """The turn of the oldest queued part: a free receive slot for it, or None for a copy."""

    key: RequestKey
    slot: int | None
    kind = DEvent.SLOT


class ReadDone(msgspec.Struct, frozen=True):
    """All bytes of a part lie in its receive slot, or in D's blocks."""

    key: RequestKey
    index: int
    kind = DEvent.READ_DONE


class ReadFailed(msgspec.Struct, frozen=True):
    """The transport gave up, terminally: nothing lands any more."""

    key: RequestKey
    index: int
    message: str
    cause: FailCause = FailCause.PEER
    kind = DEvent.READ_FAILED


class Unpacked(msgspec.Struct, frozen=True):
    """A part was verified and is in D's blocks, as the host has seen; or ``fault`` is set."""

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
