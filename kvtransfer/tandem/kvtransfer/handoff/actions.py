"""What the machines ask for: the whole output of a step, executed by the transfer thread."""

from __future__ import annotations

from typing import NewType

import msgspec

from tandem.kvtransfer.events import ConsumerEvent, ProducerEvent
from tandem.kvtransfer.handoff.messages import KeyedToConsumer, KeyedToProducer
from tandem.protocol.ids import Incarnation, RequestKey

Millis = NewType("Millis", int)
"""Milliseconds of this process's monotonic clock; never sent, never compared between hosts."""


class Send(msgspec.Struct, frozen=True):
    """Say this to a peer, on the link as it stands."""

    to: Incarnation
    message: KeyedToConsumer | KeyedToProducer


class Tell(msgspec.Struct, frozen=True):
    """Queue this for the engine's thread."""

    event: ProducerEvent | ConsumerEvent


class Pack(msgspec.Struct, frozen=True):
    """P: copy blocks into a send slot behind a header; answer with ``Packed``."""

    key: RequestKey
    consumer: Incarnation
    index: int
    start: int
    stop: int
    slot: int
    block_ids: tuple[int, ...]


class Read(msgspec.Struct, frozen=True):
    """D: bring a send slot of the peer into a receive slot; answer with ``read_ended``."""

    key: RequestKey
    peer: Incarnation
    index: int
    remote_slot: int
    slot: int
    nbytes: int


class Unpack(msgspec.Struct, frozen=True):
    """D: check header and digest of a receive slot, copy it to blocks; answer ``Unpacked``."""

    key: RequestKey
    peer: Incarnation
    index: int
    start: int
    stop: int
    slot: int
    block_ids: tuple[int, ...]
    nbytes: int


class Free(msgspec.Struct, frozen=True):
    """The slot is nobody's; carried out by the table that owns the ring."""

    slot: int


class Quarantine(msgspec.Struct, frozen=True):
    """The slot's read is not terminal; not to be used until it is. Carried out by the table."""

    slot: int


class Count(msgspec.Struct, frozen=True):
    """Something late, repeated or unknown came: a metric, never an error."""

    what: str


Action = Send | Tell | Pack | Read | Unpack | Free | Quarantine | Count
