"""Frames between a router and a worker, in msgpack with a tag per kind.

The router connects a DEALER to the worker's ROUTER socket. A ZMQ message is a ``link`` header and
one of these.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import (
    Annotated,
    Generic,
    NamedTuple,
    TypeVar,
)

import msgspec
from msgspec import Meta

from tandem.protocol.card import ModelCard
from tandem.protocol.commands import Command, Reply
from tandem.protocol.ids import Incarnation
from tandem.protocol.outputs import (
    Accepted,
    BlockEvents,
    EngineOutput,
    Failed,
    Refused,
)
from tandem.protocol.requests import EngineCoreRequest
from tandem.protocol.timeline import LegTimes

TARGET_ITL_MS = 25.0
"""Default of a router's target between tokens."""
SHARE_OF_TARGET = 0.84
"""Share of the target that a step may take."""


def step_bound(target_itl_ms: float, given: Collection[str]) -> list[str]:
    """Return the flags that bound the steps of a worker, for a target in milliseconds.

    Empty if a setting in ``given``, by name, has a bound.
    """
    if "max_itl_ms" in given:
        return []
    return ["--max-itl-ms", f"{SHARE_OF_TARGET * target_itl_ms:g}"]


StepTimes = Annotated[tuple[tuple[int, float], ...], Meta(max_length=32)]
"""(size of a step, seconds), by size in decodes or prompt tokens; empty if unknown."""


class DecodeBatch(NamedTuple):
    """Decodes of one step."""

    streams: int
    context: int = 0
    """Tokens of context of all streams."""

    def joined(self, tokens: int) -> DecodeBatch:
        """Return a copy with another stream, of ``tokens`` of context."""
        return DecodeBatch(self.streams + 1, self.context + tokens)


def seconds_at(points: Sequence[tuple[int, float]], size: int) -> float:
    """Return the seconds of a step of ``size``, 0 if unknown.

    Interpolates between points, and scales the nearest one beyond them.
    """
    if not points or size <= 0:
        return 0.0
    before = points[0]
    if size <= before[0]:
        return before[1] * size / before[0]
    for after in points[1:]:
        if size <= after[0]:
            share = (size - before[0]) / (after[0] - before[0])
            return before[1] + share * (after[1] - before[1])
        before = after
    return before[1] * size / before[0]


def decode_seconds(points: Sequence[tuple[int, float]], decodes: int) -> float:
    """Return the seconds of a step of so many decodes.

    Weights are read once, so the first point is the minimum. Beyond the last point, extends the
    last segment.
    """
    if not points or decodes <= 0:
        return 0.0
    first, last = points[0], points[-1]
    if decodes <= first[0]:
        return first[1]
    if decodes <= last[0]:
        return seconds_at(points, decodes)
    if len(points) == 1:
        return last[1]
    before = points[-2]
    slope = max(0.0, (last[1] - before[1]) / (last[0] - before[0]))
    return last[1] + slope * (decodes - last[0])


def decode_batch_seconds(
    points: Sequence[tuple[int, float]], context_s: float, decode_batch: DecodeBatch
) -> float:
    """Return the seconds of a step of decodes, 0 if unknown.

    ``points`` exclude contexts; each token of a context takes ``context_s``.
    """
    own = decode_seconds(points, decode_batch.streams)
    return own + context_s * decode_batch.context if own else 0.0


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
