"""Actions of the state machines, executed by the transfer thread."""

from __future__ import annotations

from typing import NewType

import msgspec

from tandem.kvtransfer.events import ConsumerEvent, ProducerEvent
from tandem.kvtransfer.handoff.form import Form
from tandem.kvtransfer.handoff.messages import KeyedToConsumer, KeyedToProducer
from tandem.protocol.ids import Incarnation, RequestKey

Millis = NewType("Millis", int)
"""Milliseconds of this process's monotonic clock; never sent or compared between hosts."""


class Send(msgspec.Struct, frozen=True):
    """Send this to a peer, on the current link."""

    to: Incarnation
    message: KeyedToConsumer | KeyedToProducer


class EmitEvent(msgspec.Struct, frozen=True):
    """Queue this for the engine's thread."""

    event: ProducerEvent | ConsumerEvent


class Pack(msgspec.Struct, frozen=True):
    """P: copy blocks into a send slot after a header; answer with ``Packed``."""

    key: RequestKey
    consumer: Incarnation
    index: int
    start: int
    stop: int
    slot: int
    block_ids: tuple[int, ...]
    group: int = 0
    form: Form | None = None


class Tag(msgspec.Struct, frozen=True):
    """P: set the tags of these blocks, whose last write is done, before READY names them."""

    key: RequestKey
    group: int
    first: int
    """Index of the first in the group's block table."""
    block_ids: tuple[int, ...]


class Untag(msgspec.Struct, frozen=True):
    """P: clear the key's tags; its blocks may be written afterwards."""

    key: RequestKey


class Read(msgspec.Struct, frozen=True):
    """D: read a peer's send slot into a receive slot (answer: ``read_ended``), or copy a peer's
    blocks into D's (answer: ``copy_ended``)."""

    key: RequestKey
    peer: Incarnation
    index: int
    remote_slot: int | None
    slot: int | None
    nbytes: int
    remote_blocks: tuple[int, ...] = ()
    block_ids: tuple[int, ...] = ()
    start: int = 0
    stop: int = 0
    """Tokens [start, stop) of the item in these blocks."""
    group: int = 0
    form: Form | None = None


class Unpack(msgspec.Struct, frozen=True):
    """D: check header and digest of a receive slot and copy it to blocks; without a slot, check the
    copied blocks' tags. Answer: ``Unpacked``."""

    key: RequestKey
    peer: Incarnation
    index: int
    start: int
    stop: int
    slot: int | None
    block_ids: tuple[int, ...]
    nbytes: int
    group: int = 0
    form: Form | None = None


class QuarantinePeer(msgspec.Struct, frozen=True):
    """D: quarantine a peer whose link delivered another hand-off's data although the lease held."""

    peer: Incarnation
    reason: str


class Free(msgspec.Struct, frozen=True):
    """Free the slot; executed by the table of the ring."""

    slot: int


class Quarantine(msgspec.Struct, frozen=True):
    """Quarantine the slot until its read is terminal; executed by the table."""

    slot: int


class Count(msgspec.Struct, frozen=True):
    """Count a late, repeated or unknown event; not an error."""

    what: str


Action = (
    Send
    | EmitEvent
    | Pack
    | Tag
    | Untag
    | Read
    | Unpack
    | QuarantinePeer
    | Free
    | Quarantine
    | Count
)
