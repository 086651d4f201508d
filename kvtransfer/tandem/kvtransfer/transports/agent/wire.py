"""Messages between workers and the agent of their node, each a packet of a Unix socket.

The agent sends ``Hello``. A worker sends one registration with descriptors, which ends with the
connection; a consumer then requests copies. A producer registers a key made from its secret;
consumer and agent prove to each other that they have it.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from tandem.kvtransfer.errors import TransportError
from tandem.kvtransfer.transports.mapped.wire import check_version, proof_of

VERSION = 2
SOCKET_NAME = "agent.sock"
MAX_MESSAGE = 16 << 10
MAX_FILES = 3
MAX_PLACES = 512
"""Ranges that one request copies."""
MAX_SLOTS = 256
"""Landing slots of a consumer, and so its copies under way."""
MAX_RING_BYTES = 8 << 30
HOST = "host"
"""Place of memory that is not a GPU's."""

Id = Annotated[bytes, Meta(min_length=16, max_length=16)]
"""An incarnation, or the digest of a place."""
Bytes32 = Annotated[bytes, Meta(min_length=32, max_length=32)]
"""A key, a proof, or random bytes."""
Number = Annotated[int, Meta(ge=0, lt=1 << 60)]
Size = Annotated[int, Meta(ge=1, lt=1 << 48)]
Where = Annotated[str, Meta(min_length=1, max_length=64)]
"""HOST, or the UUID of the memory's GPU."""


class Ground(IntEnum):
    """Range of a producer that is read."""

    BLOCKS = 0
    SLOTS = 1


class Fault(IntEnum):
    """Reason why a copy was not made."""

    UNKNOWN = 0
    """No producer of that incarnation is registered yet."""
    DENIED = 1
    """The consumer has not proved the producer's secret."""
    STALE = 2
    """The request is of another consumer than the connection."""
    OUTSIDE = 3
    """A range, slot or size does not exist."""
    BUSY = 4
    """A copy into that slot is under way."""
    FAILED = 5


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """First message of the agent."""

    version: Number
    challenge: Annotated[bytes, Meta(max_length=32)] = b""
    """Random bytes; empty from an agent of version 1."""


class Give(msgspec.Struct, frozen=True, array_like=True, tag="give"):
    """Registration of a producer, with the descriptors of KV cache, slots and tags, to be read."""

    version: Number
    incarnation: Id
    key: Bytes32
    sizes: tuple[Size, Size, Size]
    block_bytes: Size
    where: Where


class Take(msgspec.Struct, frozen=True, array_like=True, tag="take"):
    """Registration of a consumer, with the descriptor of its landing slots, to be written."""

    version: Number
    incarnation: Id
    slot_bytes: Size
    num_slots: Annotated[int, Meta(ge=1, le=MAX_SLOTS)]
    block_bytes: Size
    where: Where
    challenge: Bytes32


class Status(msgspec.Struct, frozen=True, array_like=True, tag="status"):
    """Request for the agent's counters, instead of a registration."""


class Registered(msgspec.Struct, frozen=True, array_like=True, tag="registered"):
    """The registration holds until the connection ends."""


class Rejected(msgspec.Struct, frozen=True, array_like=True, tag="rejected"):
    """The registration is refused; the connection ends."""

    reason: str


class Copy(msgspec.Struct, frozen=True, array_like=True, tag="copy"):
    """Copy ranges of ``size`` bytes, concatenated, to the start of a landing slot."""

    number: Number
    producer: Id
    proof: Bytes32
    """See ``consumers_proof``."""
    consumer: Id
    ground: Ground
    places: Annotated[tuple[Number, ...], Meta(min_length=1, max_length=MAX_PLACES)]
    """Offsets of the ranges in bytes; of blocks whole multiples of a block."""
    size: Size
    slot: Annotated[int, Meta(ge=0, lt=MAX_SLOTS)]


class Copied(msgspec.Struct, frozen=True, array_like=True, tag="copied"):
    """The copy has ended well."""

    number: Number
    tags: bytes
    """Tags of blocks, 16 bytes each, read after the copy; zeros if one changed during it."""
    proof: Bytes32
    """See ``agents_proof``."""


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """The copy was not made or not completed; nothing writes the slot."""

    number: Number
    fault: Fault


class Counts(msgspec.Struct, frozen=True, array_like=True, tag="counts"):
    """Answer to Status."""

    counts: dict[str, int]


class AgentCard(msgspec.Struct, frozen=True, array_like=True):
    """Address at which a consumer requests P's blocks from the agent. Earlier releases begin with
    the place, so neither accepts the other's card."""

    version: Annotated[int, Meta(ge=1)]
    place: Id
    """Identity of the folder in which P meets the agent."""
    incarnation: Id
    secret: Bytes32


ToAgent = Give | Take | Copy | Status
ToWorker = Hello | Registered | Rejected | Copied | Refused | Counts
Message = TypeVar("Message")

# Made once, as threads must not make it at the same time.
to_agent: msgspec.msgpack.Decoder[ToAgent] = msgspec.msgpack.Decoder(ToAgent)
to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
_cards = msgspec.msgpack.Decoder(AgentCard)
encode = msgspec.msgpack.encode


def decode_card(data: bytes) -> AgentCard:
    """Decode a card of WELCOME. Raises TransportError, which names the versions if they differ."""
    check_version(data, VERSION, "the agent's protocol")
    try:
        return _cards.decode(data)
    except msgspec.MsgspecError as error:
        raise TransportError(f"not a card of a node's agent: {error}") from error


class Connection(NamedTuple):
    """Random bytes of both ends of a consumer's connection, for its proofs."""

    agents: bytes
    consumers: bytes


def consumers_proof(key: bytes, connection: Connection, producer: bytes, consumer: bytes) -> bytes:
    """Return the proof that a consumer has the producer's secret."""
    return proof_of(key, b"consumer", *connection, producer, consumer)


def agents_proof(key: bytes, connection: Connection, request: Copy, tags: bytes) -> bytes:
    """Return the proof that the producer has registered with this agent."""
    number = request.number.to_bytes(8, "little")
    return proof_of(key, b"agent", *connection, request.producer, request.consumer, number, tags)
