"""Actions of the machines: the whole output of a step, executed by the transfer thread."""

from __future__ import annotations

from typing import NewType

import msgspec

from tandem.kvtransfer.events import ConsumerEvent, ProducerEvent
from tandem.kvtransfer.handoff.form import Form
from tandem.kvtransfer.handoff.messages import KeyedToConsumer, KeyedToProducer
from tandem.protocol.ids import Incarnation, RequestKey

Millis = NewType("Millis", int)
"""Milliseconds of this process's monotonic clock; never sent, never compared between hosts."""


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
    """P: the last write of these blocks is done. Set the tags before READY names the blocks."""

    key: RequestKey
    group: int
    first: int
    """Index in the group's block table of the first."""
    block_ids: tuple[int, ...]


class Untag(msgspec.Struct, frozen=True):
    """P: clear the tags that were set for this key; its blocks may be written from here on."""

    key: RequestKey


class Read(msgspec.Struct, frozen=True):
    """D: bring a send slot of the peer into a receive slot, answer with ``read_ended``; or (without
    slots) blocks of the peer into blocks of its own, answer with ``copy_ended``."""

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
    """Tokens [start, stop) of the item, for which these blocks are."""
    form: Form | None = None


class Unpack(msgspec.Struct, frozen=True):
    """D: check header and digest of a receive slot and copy it to blocks; or (without a slot) check
    the tags of what was copied. Answer ``Unpacked``."""

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
    """The slot is free; carried out by the table that owns the ring."""

    slot: int


class Quarantine(msgspec.Struct, frozen=True):
    """The slot's read is not terminal; not to be used until it is. Carried out by the table."""

    slot: int


class Count(msgspec.Struct, frozen=True):
    """Something late, repeated or unknown came: a metric, never an error."""

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
