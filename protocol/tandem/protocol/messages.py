"""Frames between a router and a worker, in msgpack with a tag per kind.

The router connects a DEALER to the worker's ROUTER socket. A ZMQ message is two parts: the
``link`` header and one of these. Whoever reads them (``tandem.link.frames``) bounds and counts what
does not fit.
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
    """From who calls, first frame of a link, and again after every RESET."""

    version: Count
    fingerprint: Annotated[str, Meta(max_length=64)] = ""
    """What the caller serves; a router serves nothing itself."""
    connectors: tuple[Annotated[str, Meta(max_length=32)], ...] = ()
    """Transports that the caller could load, in order of preference."""
    auth: Annotated[bytes, Meta(max_length=16)] = b""
    """MAC over the caller's incarnation and the fingerprint under a secret, where there is one."""


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """Start an attempt: a prefill or a decode leg, or both (see ``EngineCoreRequest.kv``)."""

    request: EngineCoreRequest


class Cancel(msgspec.Struct, frozen=True, tag="cancel", omit_defaults=True):
    """Drop an attempt; for an unknown key the worker keeps a tombstone."""

    request: str
    attempt: int
    choices: tuple[Count, ...] = ()
    """Only these of it, the others go on; for workers that say they know of it, as others would
    drop all. Unknown keys and choices are nothing then."""


class Call(msgspec.Struct, frozen=True, tag="call"):
    """A command for the engine."""

    command: Command


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """Both ways: alive, and how far. Standing still with work is not alive."""

    engine_step: Count = 0
    transfers: Count = 0
    """Grows while KV moves, and while a worker can only wait for that of its peers."""
    has_work: bool = False


class LoadReport(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's load, for placement; sent with its beats."""

    num_running: int
    num_waiting: int
    waiting_tokens: int
    """Prompt tokens not yet computed over all requests."""
    loading_tokens: int = 0
    """Of the waiting tokens, those whose KV comes or is to come from prefill workers."""
    free_blocks: int
    total_blocks: int
    leased_blocks: int = 0
    prefill_tokens_per_s: float = 0.0
    """Measured over the last steps; 0 while unknown."""
    num_decoding: int = 0
    """Of the running ones, those past their prompt."""
    context_tokens: int = 0
    """Tokens before the next of each of those, all together."""
    decode_steps: StepTimes = ()
    """Seconds of steps by the number of their decodes, without what contexts take."""
    context_s: float = 0.0
    """Seconds for each token of a decode's context; 0 while unknown."""
    prompt_steps: StepTimes = ()
    """Seconds that prompt tokens take, or add to a step, by their number, at a prompt's start."""
    beside_steps: StepTimes = ()
    """Seconds that they add to a step of decodes, which has read the weights already."""
    steepness: float = 0.0
    """By what share a prompt's token takes longer there for each token before it."""
    chunk_tokens: int = 0
    """Prompt tokens that a step takes beside those that decode now; 0 while unknown."""
    mixed_chunk_tokens: int = 0
    """Prompt tokens that a step takes beside decodes, of which there is one at least; 0 while
    unknown. Differs from ``chunk_tokens`` while nothing decodes."""
    bounds_steps: bool = False
    """Whether those keep a step within a time: behind a long context they are fewer."""
    residence_s: float = 0.0
    """Mean seconds that a request holds its blocks; 0 while unknown."""
    prompt_share: float = 0.0
    """Of its time, what prompts took lately, 0 to 1: decodes beside them are not counted."""
    prompts_per_s: float = 0.0
    """Prompts whose last token was computed here lately, a second."""
    draining: bool = False
    sleeping: bool = False
    """Whether nothing is taken until the worker is woken up."""
    computed_tokens: int = 0
    """Prompt tokens computed here since the start."""
    generated_tokens: int = 0
    """Tokens drawn here since the start."""


class PeerHealth(msgspec.Struct, frozen=True):
    """A decode worker's view of one prefill worker."""

    peer: Incarnation
    up: bool
    reason: str = ""
    transport: str = ""
    """What moves KV from there; empty while the link is down."""
    bytes_per_s: float = 0.0
    """KV that came, over the seconds in which some waited; 0 while unknown."""
    waiting_bytes: int = 0
    """KV that is announced from there and has not come."""
    probed_bytes_per_s: float = 0.0
    """Rate of the link's pattern, of which a good deal is waiting; 0 while it is down."""


class Welcome(msgspec.Struct, Generic[Card], frozen=True, tag="welcome"):
    """To who called: the link stands."""

    card: Card
    """What the caller needs to know; its kind is the protocol's."""


class WorkerBeat(msgspec.Struct, frozen=True, tag="worker_beat"):
    """The worker's beat: progress, load, and (a decode worker) its links to prefill workers."""

    beat: Beat
    load: LoadReport
    peers: tuple[PeerHealth, ...] = ()


class Frame(msgspec.Struct, frozen=True, tag="frame", omit_defaults=True):
    """All that one engine step has to say to one router, or a part of it where that is large."""

    step: int
    outputs: tuple[EngineOutput, ...] = ()
    accepted: tuple[Accepted, ...] = ()
    refused: tuple[Refused, ...] = ()
    failed: tuple[Failed, ...] = ()
    blocks: BlockEvents | None = None
    times: tuple[LegTimes, ...] = ()
    """Of attempts that ended here and are watched."""


class ReplyTo(msgspec.Struct, frozen=True, tag="reply"):
    """Answer to CALL."""

    reply: Reply


class PeerSet(msgspec.Struct, frozen=True, tag="peers"):
    """Router to decode worker: the prefill workers to keep links to (``host:port`` each)."""

    controls: dict[str, Incarnation]


class Draining(msgspec.Struct, frozen=True, tag="draining"):
    """The worker got its signal: place nothing new, expect an end within ``grace_ms``."""

    grace_ms: int


class Reset(msgspec.Struct, frozen=True, tag="reset"):
    """Both ways: there is no link (any more). Its keys have failed; HELLO begins another."""

    reason: Annotated[str, Meta(max_length=500)]


ToWorker = Hello | Submit | Cancel | Call | Beat | PeerSet | Reset
ToRouter = Welcome[ModelCard] | Frame | WorkerBeat | ReplyTo | Draining | Reset

_encoder = msgspec.msgpack.Encoder()


def encode(message: msgspec.Struct) -> bytes:
    """Bytes of one message."""
    return _encoder.encode(message)
