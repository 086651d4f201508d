"""Frames between a router and a worker, in msgpack with a tag per kind.

The router connects a DEALER to the worker's ROUTER socket. A ZMQ message is a ``link`` header and
one of these.
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
    """First frame of a link, sent by the caller, and again after a RESET."""

    version: Count
    fingerprint: Annotated[str, Meta(max_length=64)] = ""
    """Fingerprint of the caller's model; empty from a router."""
    connectors: tuple[Annotated[str, Meta(max_length=32)], ...] = ()
    """Transports of the caller, in order of preference."""
    auth: Annotated[bytes, Meta(max_length=16)] = b""
    """MAC over incarnation and fingerprint, if there is a shared secret."""


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """Start an attempt: a prefill or a decode leg, or both."""

    request: EngineCoreRequest


class Cancel(msgspec.Struct, frozen=True, tag="cancel", omit_defaults=True):
    """Drop an attempt. The worker keeps a tombstone for an unknown key."""

    request: str
    attempt: int
    choices: tuple[Count, ...] = ()
    """Choices to drop; empty drops all. Sent only to workers that support it."""


class Call(msgspec.Struct, frozen=True, tag="call"):
    """A command for the engine."""

    command: Command


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """Progress counters. A peer with work but without progress counts as lost."""

    engine_step: Count = 0
    transfers: Count = 0
    """Grows while KV is transferred, or peers' transfers are awaited."""
    has_work: bool = False


class LoadReport(msgspec.Struct, frozen=True, kw_only=True):
    """Load of a worker, sent with its beats."""

    num_running: int
    num_waiting: int
    waiting_tokens: int
    """Prompt tokens not yet computed."""
    loading_tokens: int = 0
    """Waiting tokens whose KV comes from prefill workers."""
    free_blocks: int
    total_blocks: int
    leased_blocks: int = 0
    prefill_tokens_per_s: float = 0.0
    """Measured over the last steps; 0 if unknown."""
    num_decoding: int = 0
    context_tokens: int = 0
    """Tokens of context of all decoding requests."""
    decode_steps: StepTimes = ()
    """Seconds of steps by number of decodes, without contexts."""
    context_s: float = 0.0
    """Seconds per token of a decode's context; 0 if unknown."""
    prompt_steps: StepTimes = ()
    """Seconds of prompt tokens by their number, at a prompt's start."""
    mixed_steps: StepTimes = ()
    """Seconds that prompt tokens add to a step of decodes."""
    steepness: float = 0.0
    """Relative increase of a prompt token's time per token before it."""
    chunk_tokens: int = 0
    """Prompt tokens per step next to the current decodes; 0 if unknown."""
    mixed_chunk_tokens: int = 0
    """Prompt tokens per step next to at least one decode; 0 if unknown."""
    bounds_steps: bool = False
    """Whether these keep a step within a time limit; then fewer fit after a long context."""
    residence_s: float = 0.0
    """Mean seconds that a request holds its blocks; 0 if unknown."""
    prompt_share: float = 0.0
    """Share of recent time spent on prompts, 0 to 1."""
    prompts_per_s: float = 0.0
    """Recent rate of completed prompts."""
    draining: bool = False
    sleeping: bool = False
    """Whether the worker is in sleep mode."""
    computed_tokens: int = 0
    """Prompt tokens computed since the start."""
    generated_tokens: int = 0
    """Tokens sampled since the start."""


class PeerHealth(msgspec.Struct, frozen=True):
    """State of a decode worker's link to one prefill worker."""

    peer: Incarnation
    up: bool
    reason: str = ""
    transport: str = ""
    """Transport of KV; empty if the link is down."""
    bytes_per_s: float = 0.0
    """Rate of received KV while some was pending; 0 if unknown."""
    waiting_bytes: int = 0
    """Bytes of KV that are announced and not yet received."""
    probed_bytes_per_s: float = 0.0
    """Rate measured with a test pattern; 0 if the link is down."""


class Welcome(msgspec.Struct, Generic[Card], frozen=True, tag="welcome"):
    """Reply to HELLO: the link is established."""

    card: Card


class WorkerBeat(msgspec.Struct, frozen=True, tag="worker_beat"):
    """Beat of a worker: progress, load, and links of a decode worker."""

    beat: Beat
    load: LoadReport
    peers: tuple[PeerHealth, ...] = ()


class Frame(msgspec.Struct, frozen=True, tag="frame", omit_defaults=True):
    """Messages of one engine step to one router, or a part of them."""

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
    """Prefill workers to which a decode worker keeps links."""

    controls: dict[str, Incarnation]


class Draining(msgspec.Struct, frozen=True, tag="draining"):
    """The worker ends within ``grace_ms``: place no new requests."""

    grace_ms: int


class Reset(msgspec.Struct, frozen=True, tag="reset"):
    """The link has ended, and its keys have failed; HELLO begins another."""

    reason: Annotated[str, Meta(max_length=500)]


ToWorker = Hello | Submit | Cancel | Call | Beat | PeerSet | Reset
ToRouter = Welcome[ModelCard] | Frame | WorkerBeat | ReplyTo | Draining | Reset

_encoder = msgspec.msgpack.Encoder()


def encode(message: msgspec.Struct) -> bytes:
    """Return the bytes of one message."""
    return _encoder.encode(message)
