"""State of one key at P, and the events of its state machine."""

from __future__ import annotations

import msgspec

from tandem.kvtransfer.handoff.actions import Millis
from tandem.kvtransfer.handoff.form import Form
from tandem.kvtransfer.handoff.manifest import Group, Item
from tandem.kvtransfer.handoff.messages import Done, Final, GoneReason, Open, Taken, Want
from tandem.kvtransfer.handoff.tables import PEvent, PState
from tandem.protocol.ids import NO_INCARNATION, Incarnation, RequestKey
from tandem.protocol.kv import BlockTables, FirstToken

_MESSAGE_EVENT = {Open: PEvent.OPEN, Want: PEvent.WANT, Taken: PEvent.TAKEN}


class ProducerPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and times of all exports."""

    block_size: int
    groups: tuple[Group, ...]
    """Groups of the layout, from which a manifest is made."""
    header_bytes: int
    lease_ms: int
    expect_ms: int
    tombstone_ms: int
    wait_ms: int


class Out(msgspec.Struct, frozen=True):
    """A part between its grant and D's answer to it."""

    index: int
    slot: int
    start: int
    stop: int
    sent: bool = False
    """Whether PART is sent: D may be reading."""
    group: int = 0


class Export(msgspec.Struct, frozen=True, kw_only=True):
    """P's state of one key."""

    key: RequestKey
    state: PState
    deadline: Millis
    """Deadline of the state: budget, hard cap, or the tombstone's end."""
    budget: Millis | None = None
    consumer: Incarnation = NO_INCARNATION
    direct: bool = False
    """Whether D reads blocks: READY names them, they carry tags, and there are no parts."""
    num_tokens: int = 0
    items: tuple[Item, ...] = ()
    tables: BlockTables = ()
    """Known block tables by group."""
    begun: bool = False
    """Whether the engine has the blocks: D may reserve its own."""
    launched: int = 0
    ready: int = 0
    final: Final | None = None
    opened: bool = False
    wants: bool = False
    packed: tuple[int, ...] = ()
    """Tokens up to which parts were cut, by item."""
    next_index: int = 0
    credits: int = 0
    max_blocks: tuple[int, ...] = ()
    form: Form | None = None
    """Form of the parts; None is P's own blocks unchanged."""
    out: tuple[Out, ...] = ()
    engine_holds: bool = False
    """Whether the engine has the key and has not released it."""
    reason: GoneReason = GoneReason.UNKNOWN


class Admit(msgspec.Struct, frozen=True):
    """The engine takes the request; its blocks are promised."""

    key: RequestKey
    consumer: Incarnation
    num_tokens: int
    budget_ms: int | None
    link_up: bool
    direct: bool = False
    kind = PEvent.ADMIT


class Refuse(msgspec.Struct, frozen=True):
    """The engine does not take the request."""

    key: RequestKey
    kind = PEvent.REFUSE


class Begun(msgspec.Struct, frozen=True):
    """The engine has blocks for the whole prompt and computes."""

    key: RequestKey
    kind = PEvent.BEGUN


class Launched(msgspec.Struct, frozen=True):
    """A chunk's kernels are launched; READY must not announce it yet."""

    key: RequestKey
    tables: BlockTables
    upto: int
    kind = PEvent.LAUNCHED


class Fenced(msgspec.Struct, frozen=True):
    """The fence after a chunk's last KV write has passed."""

    key: RequestKey
    upto: int
    kind = PEvent.FENCED


class First(msgspec.Struct, frozen=True):
    """Token 1 of each choice."""

    key: RequestKey
    first: tuple[FirstToken, ...]
    finish: str | None
    kind = PEvent.FIRST


class Finished(msgspec.Struct, frozen=True):
    """The engine releases the blocks once the export does."""

    key: RequestKey
    cancelled: bool
    kind = PEvent.FINISHED


class Cancel(msgspec.Struct, frozen=True):
    """The router cancelled the request, or its messages cannot be sent."""

    key: RequestKey
    reason: GoneReason = GoneReason.CANCELLED
    kind = PEvent.CANCEL


class ConsumerMessage(msgspec.Struct, frozen=True):
    """A message of D."""

    key: RequestKey
    source: Incarnation
    message: Open | Want | Taken | Done

    @property
    def kind(self) -> PEvent:
        if isinstance(self.message, Done):
            return PEvent.DONE_OK if self.message.ok else PEvent.DONE_ABANDON
        return _MESSAGE_EVENT[type(self.message)]


class Granted(msgspec.Struct, frozen=True):
    """A free send slot for the next part."""

    key: RequestKey
    slot: int
    kind = PEvent.SLOT


class Packed(msgspec.Struct, frozen=True):
    """A part is in its slot (or could not be packed)."""

    key: RequestKey
    index: int
    ok: bool
    kind = PEvent.PACKED


class LinkLost(msgspec.Struct, frozen=True):
    """The link to the consumer broke."""

    key: RequestKey
    kind = PEvent.LINK_LOST


class Timeout(msgspec.Struct, frozen=True):
    """``deadline`` has passed."""

    key: RequestKey
    kind = PEvent.TIMEOUT


Event = (
    Admit
    | Refuse
    | Begun
    | Launched
    | Fenced
    | First
    | Finished
    | Cancel
    | ConsumerMessage
    | Granted
    | Packed
    | LinkLost
    | Timeout
)
