"""What workers and the agent of their node say to each other, a message a packet of a Unix socket.

The agent speaks first (``Hello``). A worker answers with one registration, its descriptors beside
it; it ends with the connection. A consumer asks for copies then, each of which is answered once.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from tandem.kvtransfer.errors import TransportError

VERSION = 1
SOCKET_NAME = "agent.sock"
MAX_MESSAGE = 16 << 10
"""Bytes of a packet."""
MAX_FILES = 3
"""Descriptors beside a message."""
MAX_PLACES = 512
"""Ranges that one request copies."""
MAX_SLOTS = 256
"""Landing slots of a consumer, and so its copies under way."""
MAX_RING_BYTES = 8 << 30
HOST = "host"
"""Where memory lies that is no GPU's."""

Id = Annotated[bytes, Meta(min_length=16, max_length=16)]
"""An incarnation, a secret, or the digest of a place."""
Number = Annotated[int, Meta(ge=0, lt=1 << 60)]
Size = Annotated[int, Meta(ge=1, lt=1 << 48)]
Where = Annotated[str, Meta(min_length=1, max_length=64)]
"""HOST, or the UUID of the GPU that has the memory."""


class Ground(IntEnum):
    """Which of a producer's ranges is read."""

    BLOCKS = 0
    SLOTS = 1


class Fault(IntEnum):
    """Why a copy was not made."""

    UNKNOWN = 0
    """No producer of that incarnation is registered; it may come."""
    DENIED = 1
    """The secret is not the producer's."""
    STALE = 2
    """The request is of another consumer than the connection."""
    OUTSIDE = 3
    """A range, a slot or a size that is not there."""
    BUSY = 4
    """A copy into that slot is under way."""
    FAILED = 5
    """The copy itself."""


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """The agent is there."""

    version: Number


class Give(msgspec.Struct, frozen=True, array_like=True, tag="give"):
    """Of a producer; beside it the descriptors of slab, slots and tags, to be read."""

    version: Number
    incarnation: Id
    secret: Id
    sizes: tuple[Size, Size, Size]
    block_bytes: Size
    where: Where


class Take(msgspec.Struct, frozen=True, array_like=True, tag="take"):
    """Of a consumer; beside it the descriptor of its landing slots, to be written."""

    version: Number
    incarnation: Id
    slot_bytes: Size
    num_slots: Annotated[int, Meta(ge=1, le=MAX_SLOTS)]
    block_bytes: Size
    where: Where


class Status(msgspec.Struct, frozen=True, array_like=True, tag="status"):
    """In place of a registration: how is it going?"""


class Registered(msgspec.Struct, frozen=True, array_like=True, tag="registered"):
    """The registration stands until the connection ends."""


class Rejected(msgspec.Struct, frozen=True, array_like=True, tag="rejected"):
    """The registration does not stand; the connection ends."""

    reason: str


class Copy(msgspec.Struct, frozen=True, array_like=True, tag="copy"):
    """Copy ranges of ``size`` bytes, one behind the other, to the start of a landing slot."""

    number: Number
    producer: Id
    secret: Id
    consumer: Id
    ground: Ground
    places: Annotated[tuple[Number, ...], Meta(min_length=1, max_length=MAX_PLACES)]
    """Bytes from the start of the ground to each range; of blocks whole multiples of a block."""
    size: Size
    slot: Annotated[int, Meta(ge=0, lt=MAX_SLOTS)]


class Copied(msgspec.Struct, frozen=True, array_like=True, tag="copied"):
    """Nothing of it lands any more, and all has."""

    number: Number
    tags: bytes
    """Of blocks, 16 bytes each: as they were behind the copy, zeros where one changed during it."""


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """Nothing of it lands any more, and it is not all there."""

    number: Number
    fault: Fault


class Counts(msgspec.Struct, frozen=True, array_like=True, tag="counts"):
    """The answer to Status."""

    counts: dict[str, int]


class AgentCard(msgspec.Struct, frozen=True, array_like=True):
    """How a consumer asks the agent for P's blocks."""

    place: Id
    """Of the folder in which P meets the agent."""
    incarnation: Id
    secret: Id


ToAgent = Give | Take | Copy | Status
ToWorker = Hello | Registered | Rejected | Copied | Refused | Counts
Message = TypeVar("Message")

# Built once: threads must not do it side by side.
to_agent: msgspec.msgpack.Decoder[ToAgent] = msgspec.msgpack.Decoder(ToAgent)
to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
_cards = msgspec.msgpack.Decoder(AgentCard)
encode = msgspec.msgpack.encode


def decode_card(data: bytes) -> AgentCard:
    """From WELCOME, or TransportError."""
    try:
        return _cards.decode(data)
    except msgspec.MsgspecError as error:
        raise TransportError(f"not a card of a node's agent: {error}") from error
