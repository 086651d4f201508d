"""Frames between a router and a worker, in msgpack with a tag per kind.

The router connects a DEALER to the worker's ROUTER socket. A ZMQ message has two parts: the
``link`` header and one of these. The reader (``tandem.link.sockets``) bounds them, and counts those
that do not decode.
"""

from typing import Annotated, Generic, TypeVar

import msgspec
from msgspec import Meta

from tandem.protocol.card import ModelCard
from tandem.protocol.commands import Command, Reply
from tandem.protocol.ids import Incarnation
from tandem.protocol.outputs import Accepted, BlockEvents, EngineOutput, Failed, Refused
from tandem.protocol.requests import EngineCoreRequest
from tandem.protocol.steps import StepTimes
from tandem.protocol.timeline import LegTimes

Card = TypeVar("Card")
Count = Annotated[int, Meta(ge=0, le=1 << 40)]


class Hello(msgspec.Struct, frozen=True, tag="hello", omit_defaults=True):
    """First frame of a link, sent by the caller, and again after every RESET."""

    version: Count
    fingerprint: Annotated[str, Meta(max_length=64)] = ""
    """Fingerprint that the caller serves; empty from a router."""
    connectors: tuple[Annotated[str, Meta(max_length=32)], ...] = ()
    """Transports that the caller could load, in order of preference."""
    auth: Annotated[bytes, Meta(max_length=16)] = b""
    """MAC over the caller's incarnation and the fingerprint, if there is a shared secret."""


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """Start an attempt: a prefill or a decode leg, or both (see ``EngineCoreRequest.kv``)."""

    request: EngineCoreRequest


class Cancel(msgspec.Struct, frozen=True, tag="cancel", omit_defaults=True):
    """Drop an attempt. The worker keeps a tombstone for an unknown key."""

    request: str
    attempt: int
    choices: tuple[Count, ...] = ()
    """Only these choices are dropped; the rest continue. Sent only to workers that support it, as
    older ones would drop all. Unknown keys and choices are then ignored."""


class Call(msgspec.Struct, frozen=True, tag="call"):
    """A command for the engine."""

    command: Command


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """Progress counters of both ends. A peer with work but no progress is treated as lost."""

    engine_step: Count = 0
    transfers: Count = 0
    """Grows while KV is transferred, and while a worker can only wait for its peers' transfers."""
    has_work: bool = False


class LoadReport(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's load, for placement; sent with its beats."""

    num_running: int
    num_waiting: int
    waiting_tokens: int
    """Prompt tokens not yet computed over all requests."""
    loading_tokens: int = 0
    """Waiting tokens whose KV is to be received from prefill workers."""
    free_blocks: int
    total_blocks: int
    leased_blocks: int = 0
    prefill_tokens_per_s: float = 0.0
    """Measured over the last steps; 0 while unknown."""
    num_decoding: int = 0
    """Running requests that have finished their prompt."""
    context_tokens: int = 0
    """Tokens of context over all decoding requests."""
    decode_steps: StepTimes = ()
    """Seconds of steps by number of decodes, without the time for contexts."""
    context_s: float = 0.0
    """Seconds for each token of a decode's context; 0 while unknown."""
    prompt_steps: StepTimes = ()
    """Seconds of prompt tokens by their number, alone or added to a step, at a prompt's start."""
    mixed_steps: StepTimes = ()
    """Seconds that prompt tokens add to a step of decodes, which has already read the weights."""
    steepness: float = 0.0
    """Relative increase in the time of a prompt token for each token before it."""
    chunk_tokens: int = 0
    """Prompt tokens per step in addition to the current decodes; 0 while unknown."""
    mixed_chunk_tokens: int = 0
    """Prompt tokens per step in addition to at least one decode; 0 while unknown. Differs from
    ``chunk_tokens`` while no request decodes."""
    bounds_steps: bool = False
    """True if these keep a step within a time limit. Then fewer fit after a long context."""
    residence_s: float = 0.0
    """Mean seconds that a request holds its blocks; 0 while unknown."""
    prompt_share: float = 0.0
    """Share of recent time spent on prompts, 0 to 1. Decodes in the same steps are not counted."""
    prompts_per_s: float = 0.0
    """Prompts per second whose last token was computed here recently."""
    draining: bool = False
    sleeping: bool = False
    """True while the worker refuses requests until it is woken up."""
    computed_tokens: int = 0
    """Prompt tokens computed here since the start."""
    generated_tokens: int = 0
    """Tokens sampled here since the start."""


class PeerHealth(msgspec.Struct, frozen=True):
    """State of the link from a decode worker to one prefill worker."""

    peer: Incarnation
    up: bool
    reason: str = ""
    transport: str = ""
    """Transport that moves KV from there; empty while the link is down."""
    bytes_per_s: float = 0.0
    """Rate of received KV, over the seconds in which some was pending; 0 while unknown."""
    waiting_bytes: int = 0
    """Bytes of KV that are announced from there and not yet received."""
    probed_bytes_per_s: float = 0.0
    """Link rate measured with a test pattern while much KV was pending; 0 while it is down."""


class Welcome(msgspec.Struct, Generic[Card], frozen=True, tag="welcome"):
    """Reply to HELLO: the link is established."""

    card: Card
    """Card of the receiver; its type depends on the protocol."""


class WorkerBeat(msgspec.Struct, frozen=True, tag="worker_beat"):
    """The worker's beat: progress, load, and (a decode worker) its links to prefill workers."""

    beat: Beat
    load: LoadReport
    peers: tuple[PeerHealth, ...] = ()


class Frame(msgspec.Struct, frozen=True, tag="frame", omit_defaults=True):
    """All messages of one engine step to one router, or a part of them if they are large."""

    step: int
    outputs: tuple[EngineOutput, ...] = ()
    accepted: tuple[Accepted, ...] = ()
    refused: tuple[Refused, ...] = ()
    failed: tuple[Failed, ...] = ()
    blocks: BlockEvents | None = None
    times: tuple[LegTimes, ...] = ()
    """Times of watched attempts that ended here."""


class ReplyTo(msgspec.Struct, frozen=True, tag="reply"):
    """Answer to CALL."""

    reply: Reply


class PeerSet(msgspec.Struct, frozen=True, tag="peers"):
    """Prefill workers that a decode worker keeps links to, sent by the router."""

    controls: dict[str, Incarnation]


class Draining(msgspec.Struct, frozen=True, tag="draining"):
    """The worker received its signal: place no new requests; it ends within ``grace_ms``."""

    grace_ms: int


class Reset(msgspec.Struct, frozen=True, tag="reset"):
    """No link, sent by either end. Its keys have failed; HELLO begins another."""

    reason: Annotated[str, Meta(max_length=500)]


ToWorker = Hello | Submit | Cancel | Call | Beat | PeerSet | Reset
ToRouter = Welcome[ModelCard] | Frame | WorkerBeat | ReplyTo | Draining | Reset

_encoder = msgspec.msgpack.Encoder()


def encode(message: msgspec.Struct) -> bytes:
    """Return the bytes of one message."""
    return _encoder.encode(message)
