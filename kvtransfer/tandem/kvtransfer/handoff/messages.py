"""Messages between producer (P) and consumer (D), in msgpack with a tag per kind.

P binds a ZMQ ROUTER, D connects a DEALER. A ZMQ message is the header of ``tandem.protocol.link``
and one of these. Decoding is strict and raises WireError. Deadlines are sent as remaining
milliseconds; places as numbers, never addresses.
"""

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from tandem.kvtransfer.handoff.form import WireDtype
from tandem.kvtransfer.handoff.manifest import MAX_GROUPS, Item
from tandem.link.sockets import Decoder
from tandem.protocol.ids import BlockHash, RequestKey
from tandem.protocol.kv import MAX_FIRST_BYTES, FirstToken
from tandem.protocol.messages import Beat, Count, Hello, Reset, Welcome

MAX_MESSAGE_BYTES = 2 * MAX_FIRST_BYTES
"""Longer messages are dropped unread (ZMQ closes the connection)."""

Small = Annotated[int, Meta(ge=0, le=1 << 24)]
MAX_BLOCKS = 1 << 16
"""Maximum blocks of one item of one hand-off."""
MAX_PULLED_BLOCKS = 1 << 15
"""Maximum blocks that one OPEN requests of a peer's cache: their hashes are half of a message."""


class GoneReason(StrEnum):
    """Reason why P holds nothing under a key."""

    UNKNOWN = "unknown"
    """Never admitted, or forgotten."""
    ABANDONED = "abandoned"
    """The consumer sent DONE without success."""
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    """The hard cap of the lease or the request's budget."""
    REFUSED = "refused"
    PEER_LOST = "peer_lost"
    """P had lost its link to the consumer."""
    PROTOCOL = "protocol"
    """The consumer sent an invalid request."""
    CLOSED = "closed"
    """Already handed over and committed."""
    INTERNAL = "internal"
    """A fault of P while packing, or a message that is too long for D."""


class ProducerCard(msgspec.Struct, frozen=True):
    """Card of P in WELCOME: its send slots and blocks and the transport to them."""

    connector: Annotated[str, Meta(max_length=32)]
    card: Annotated[bytes, Meta(max_length=64 << 10)]
    """Transport's own description of P's send slots."""
    slot_bytes: Count
    num_slots: Small
    """Send slots; one more after them holds the pattern."""
    block_bytes: Count
    num_blocks: Small = 0
    """Blocks of P's KV cache, for transports that read them."""
    groups: Annotated[tuple[Annotated[str, Meta(max_length=64)], ...], Meta(max_length=99)] = ()
    """Kinds of the groups of P's KV layout, in order."""
    block_size: Small = 0
    tensor_parallel_rank: Small = 0
    """Rank of the KV cache."""
    tensor_parallel_size: Small = 1
    """Ranks that share each layer's heads."""
    wire_dtype: WireDtype = WireDtype.AUTO
    """Type that P requests for KV; fp8 if either end requests it."""
    dtypes: Annotated[tuple[Annotated[str, Meta(max_length=32)], ...], Meta(max_length=99)] = ()
    """Types in which P holds its ``groups``."""


class Probe(msgspec.Struct, frozen=True, tag="probe"):
    """D → P: D is about to read the pattern slot; P must progress the transport."""

    number: Count


class ProbeReady(msgspec.Struct, frozen=True, tag="probe_ready"):
    """P → D: the pattern is written, with this many bytes."""

    number: Count
    nbytes: Count


class ProbeDone(msgspec.Struct, frozen=True, tag="probe_done"):
    """D → P: the pattern was read, or the read was given up."""

    number: Count
    ok: bool


class Open(msgspec.Struct, frozen=True, tag="open"):
    """D → P: request READY and FINAL of this key. Idempotent. With hashes, request these cached
    blocks, from the first on; P computes nothing."""

    key: RequestKey
    budget_ms: Count | None
    hashes: Annotated[
        tuple[Annotated[BlockHash, Meta(min_length=16, max_length=16)], ...],
        Meta(max_length=MAX_PULLED_BLOCKS),
    ] = ()


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """P → D, cumulative: KV of tokens [0, upto) of num_tokens is written and leased. upto is 0 when
    P begins; items is the manifest. On a link that copies KV, blocks are its places, and READY is
    repeated shortly before the last write to wake D."""

    key: RequestKey
    upto: Count
    num_tokens: Count
    items: Annotated[tuple[Item, ...], Meta(min_length=1, max_length=MAX_GROUPS)]
    blocks: Annotated[
        tuple[Annotated[tuple[Small, ...], Meta(max_length=MAX_BLOCKS)], ...],
        Meta(max_length=MAX_GROUPS),
    ] = ()
    """Available blocks by item, from its start; empty if parts go through slots."""


class Want(msgspec.Struct, frozen=True, tag="want"):
    """D → P: send parts from this token on, at most ``credits`` ahead of TAKEN."""

    key: RequestKey
    from_token: Count
    """A multiple of ``block_size``."""
    credits: Annotated[int, Meta(ge=1, le=1 << 16)]
    max_blocks: Annotated[
        tuple[Annotated[int, Meta(ge=1, le=1 << 24)], ...],
        Meta(min_length=1, max_length=MAX_GROUPS),
    ]
    """Blocks of a part that D takes, by group."""
    block_size: Annotated[int, Meta(ge=1, le=1 << 24)]
    """Tokens of a sent block, which divide those of P's own."""
    dtype: WireDtype = WireDtype.AUTO


class Part(msgspec.Struct, frozen=True, tag="part"):
    """P → D: tokens [start, stop) of an item are packed in a send slot after a header."""

    key: RequestKey
    index: Count
    start: Count
    stop: Count
    slot: Small
    nbytes: Count
    """Header and payload together."""
    group: Annotated[int, Meta(ge=0, lt=MAX_GROUPS)] = 0
    """Index of the item's group."""


class Taken(msgspec.Struct, frozen=True, tag="taken"):
    """D → P: the read of this part has ended; P may reuse its slot."""

    key: RequestKey
    index: Count


class Final(msgspec.Struct, frozen=True, tag="final"):
    """P → D: token 1 of each choice; all KV is announced."""

    key: RequestKey
    first: tuple[FirstToken, ...]
    finish: Annotated[str, Meta(max_length=32)] | None = None
    """Set when token 1 ended all choices of the request."""


class Done(msgspec.Struct, frozen=True, tag="done"):
    """D → P: all reads have ended and are valid (ok), or D abandons the key."""

    key: RequestKey
    ok: bool


class Committed(msgspec.Struct, frozen=True, tag="committed"):
    """P → D: the lease never lapsed, so the KV that D read is valid."""

    key: RequestKey


class Gone(msgspec.Struct, frozen=True, tag="gone"):
    """P → D: there is no lease under this key."""

    key: RequestKey
    reason: GoneReason


ToProducer = Hello | Probe | ProbeDone | Open | Want | Taken | Done | Beat | Reset
ToConsumer = (
    Welcome[ProducerCard] | ProbeReady | Ready | Part | Final | Committed | Gone | Beat | Reset
)
Message = ToProducer | ToConsumer
KeyedToProducer = Open | Want | Taken | Done
ForProducer = Open | Want | Taken | Done | Probe | ProbeDone
"""Messages for the transfer thread of P; the link handles the rest."""
KeyedToConsumer = Ready | Part | Final | Committed | Gone

decode_to_producer: Decoder[ToProducer] = Decoder(ToProducer, MAX_MESSAGE_BYTES)
decode_to_consumer: Decoder[ToConsumer] = Decoder(ToConsumer, MAX_MESSAGE_BYTES)
