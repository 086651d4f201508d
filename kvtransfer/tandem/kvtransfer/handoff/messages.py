"""What producer (P) and consumer (D) say to each other, in msgpack with a tag per kind.

P binds a ZMQ ROUTER, D connects a DEALER. A ZMQ message is two parts: the header of
``tandem.protocol.link`` (both incarnations and a sequence number) and one of these. Decoding is
strict: unknown tags, wrong types and numbers out of range raise WireError. Deadlines travel as
remaining milliseconds; slots, ranges and numbers of blocks, never addresses.
"""

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from tandem.kvtransfer.handoff.form import WireDtype
from tandem.kvtransfer.handoff.manifest import MAX_GROUPS, Item
from tandem.link.frames import Decoder
from tandem.protocol.ids import BlockHash, RequestKey
from tandem.protocol.kv import MAX_FIRST_BYTES, FirstToken
from tandem.protocol.messages import Beat, Count, Hello, Reset, Welcome

MAX_MESSAGE_BYTES = 2 * MAX_FIRST_BYTES
"""Anything longer is dropped unread (ZMQ closes the connection)."""

Small = Annotated[int, Meta(ge=0, le=1 << 24)]
MAX_BLOCKS = 1 << 16
"""Of one item of one hand-off."""
MAX_PULLED_BLOCKS = 1 << 15
"""That are asked of a peer's cache at once: their hashes are half of a message."""


class GoneReason(StrEnum):
    """Why P holds nothing (any more) under a key."""

    UNKNOWN = "unknown"
    """Never admitted, or so long ago that it is forgotten."""
    ABANDONED = "abandoned"
    """The consumer said so."""
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    """The hard cap of the lease or the request's budget."""
    REFUSED = "refused"
    """P did not admit the request."""
    PEER_LOST = "peer_lost"
    """P had lost its link to the consumer."""
    PROTOCOL = "protocol"
    """The consumer asked for something that it cannot have."""
    CLOSED = "closed"
    """Already handed over and committed."""
    INTERNAL = "internal"
    """A fault of P's own, while packing, or what it has to say is longer than D reads."""


class ProducerCard(msgspec.Struct, frozen=True):
    """Of P's WELCOME: how to reach the send slots."""

    connector: Annotated[str, Meta(max_length=32)]
    card: Annotated[bytes, Meta(max_length=64 << 10)]
    """The transport's own description of P's send slots."""
    slot_bytes: Count
    num_slots: Small
    """Send slots; one more after them holds the pattern."""
    block_bytes: Count
    num_blocks: Small = 0
    """Blocks of P's slab, for transports that read them."""
    groups: Annotated[tuple[Annotated[str, Meta(max_length=64)], ...], Meta(max_length=99)] = ()
    """Kinds of the groups of P's KV layout, in order."""
    block_size: Small = 0
    """Tokens of a block of P's."""
    tensor_parallel_rank: Small = 0
    """Whose slab it is."""
    tensor_parallel_size: Small = 1
    """Of how many that share each layer's heads."""
    wire_dtype: WireDtype = WireDtype.AUTO
    """In what type P wants KV to travel; if fp8 at either end, it does."""


class Probe(msgspec.Struct, frozen=True, tag="probe"):
    """D → P: I am about to read the pattern slot; keep the transport moving."""

    number: Count


class ProbeReady(msgspec.Struct, frozen=True, tag="probe_ready"):
    """P → D: the pattern is there, this many bytes."""

    number: Count
    nbytes: Count


class ProbeDone(msgspec.Struct, frozen=True, tag="probe_done"):
    """D → P: the pattern was read (or given up)."""

    number: Count
    ok: bool


class Open(msgspec.Struct, frozen=True, tag="open"):
    """D → P: this key is mine; say READY and FINAL. Idempotent. With hashes it is no request of
    P's: D asks for what P has cached of these blocks, from the first on."""

    key: RequestKey
    budget_ms: Count | None
    hashes: Annotated[
        tuple[Annotated[BlockHash, Meta(min_length=16, max_length=16)], ...],
        Meta(max_length=MAX_PULLED_BLOCKS),
    ] = ()


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """P → D, cumulative: KV of tokens [0, upto) of num_tokens is written, and leased (of none yet,
    when P begins); items is the manifest of all that comes; blocks says where it
    lies in P's slab, on a link that copies it. There it is said again, with nothing new, when the
    last of the prompt is about to be written, so that D is awake."""

    key: RequestKey
    upto: Count
    num_tokens: Count
    items: Annotated[tuple[Item, ...], Meta(min_length=1, max_length=MAX_GROUPS)]
    blocks: Annotated[
        tuple[Annotated[tuple[Small, ...], Meta(max_length=MAX_BLOCKS)], ...],
        Meta(max_length=MAX_GROUPS),
    ] = ()
    """By item, from its start as far as it can be taken; none where parts go by slots."""


class Want(msgspec.Struct, frozen=True, tag="want"):
    """D → P: cut parts from this token on, so many ahead of what I took; block_size and dtype say
    in what they are to travel."""

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
    """Tokens of a block on its way: P's own are as many, or a multiple."""
    dtype: WireDtype = WireDtype.AUTO
    """In what type the parts are to be packed."""


class Part(msgspec.Struct, frozen=True, tag="part"):
    """P → D: tokens [start, stop) of an item lie packed in a send slot behind a header."""

    key: RequestKey
    index: Count
    start: Count
    stop: Count
    slot: Small
    nbytes: Count
    """Header and payload together."""
    group: Annotated[int, Meta(ge=0, lt=MAX_GROUPS)] = 0
    """Of the item."""


class Taken(msgspec.Struct, frozen=True, tag="taken"):
    """D → P: the read of this part is terminal; its slot is yours."""

    key: RequestKey
    index: Count


class Final(msgspec.Struct, frozen=True, tag="final"):
    """P → D: token 1 of each choice; all KV is announced."""

    key: RequestKey
    first: tuple[FirstToken, ...]
    finish: Annotated[str, Meta(max_length=32)] | None = None
    """Set when token 1 ended the request, all its choices."""


class Done(msgspec.Struct, frozen=True, tag="done"):
    """D → P: all reads are terminal and good (ok), or I want no more."""

    key: RequestKey
    ok: bool


class Committed(msgspec.Struct, frozen=True, tag="committed"):
    """P → D: the lease never lapsed; what you read is right."""

    key: RequestKey


class Gone(msgspec.Struct, frozen=True, tag="gone"):
    """P → D: nothing under this key is promised."""

    key: RequestKey
    reason: GoneReason


ToProducer = Hello | Probe | ProbeDone | Open | Want | Taken | Done | Beat | Reset
ToConsumer = (
    Welcome[ProducerCard] | ProbeReady | Ready | Part | Final | Committed | Gone | Beat | Reset
)
Message = ToProducer | ToConsumer
KeyedToProducer = Open | Want | Taken | Done
ForProducer = Open | Want | Taken | Done | Probe | ProbeDone
"""What the transfer thread of P is told of; the rest is the link's own."""
KeyedToConsumer = Ready | Part | Final | Committed | Gone

decode_to_producer: Decoder[ToProducer] = Decoder(ToProducer, MAX_MESSAGE_BYTES)
"""Of what a consumer says."""
decode_to_consumer: Decoder[ToConsumer] = Decoder(ToConsumer, MAX_MESSAGE_BYTES)
"""Of what a producer says."""
