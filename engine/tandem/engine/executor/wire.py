"""Messages between an engine and a rank in another process, encoded by msgspec.

A result is sent once its step's writes have ended, so its fence is done and is not sent.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tandem.engine.config import EngineConfig
from tandem.engine.kv_memory import Capacity
from tandem.engine.ranks import GroupError
from tandem.engine.step import (
    DraftSampled,
    FenceDone,
    ModelRunnerOutput,
    Sampled,
    SchedulerOutput,
    SeqId,
    TokenMasks,
    TransferReport,
)
from tandem.protocol.commands import SleepTag
from tandem.protocol.errors import InvalidParameter, TandemError, shown
from tandem.protocol.outputs import TokenLogprobs


class Start(msgspec.Struct, frozen=True, tag=True):
    """First message to a rank."""

    config: EngineConfig
    log_level: int
    rank: int
    store: str
    """URL by which the ranks find each other."""


class MoveMemory(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Request to free memory, or to allocate it again, between steps."""

    level: int = 0
    """Level of the sleep; 0 is to wake up."""
    tags: tuple[SleepTag, ...] = ()
    """Parts to wake."""


class MemoryMoved(msgspec.Struct, frozen=True, tag=True):
    """Answer to MoveMemory."""

    nbytes: int
    """Freed bytes; 0 for a wake-up."""


class Profile(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Request to begin or end the recording of steps."""

    folder: str | None
    """Folder of the file; None ends the recording."""


class Profiled(msgspec.Struct, frozen=True, tag=True):
    """Answer to Profile, which may come before results of earlier steps."""

    path: str
    error: str | None = None
    """Reason for a failure."""


class Started(msgspec.Struct, frozen=True, tag=True):
    """Message that the rank has loaded weights and KV cache."""

    capacity: Capacity
    kv_cache_bytes: int
    """Bytes of the shared KV cache, whose descriptor follows; 0 if it cannot be shared."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Error of a rank, which continues after a step's failure and ends after its start's."""

    kind: str
    text: str
    of_group: bool = False
    """Whether an exchange failed, whose cause is in another rank."""
    param: tuple[str, str, str] | None = None
    """(field, value as shown, what is allowed) of an InvalidParameter."""


class StepResult(msgspec.Struct, frozen=True, tag=True):
    """A ModelRunnerOutput whose fence is done. Ranks after the first send only its step."""

    step: int
    sampled: tuple[Sampled, ...]
    prompt_logprobs: dict[SeqId, tuple[TokenLogprobs, ...]] = {}
    transfers: TransferReport | None = None
    pooled: dict[SeqId, bytes] = {}
    drafted: tuple[DraftSampled, ...] = ()
    num_proposed: dict[SeqId, int] = {}

    @classmethod
    def of(cls, output: ModelRunnerOutput) -> StepResult:
        """Return an output without its fence, which must be done."""
        assert output.fence.done(), "a result is sent when its step's writes have landed"
        return cls(
            output.step,
            output.sampled,
            output.prompt_logprobs,
            output.transfers,
            output.pooled,
            output.drafted,
            output.num_proposed,
        )

    def output(self) -> ModelRunnerOutput:
        return ModelRunnerOutput(
            self.step,
            self.sampled,
            FenceDone(),
            self.prompt_logprobs,
            self.transfers,
            self.pooled,
            self.drafted,
            self.num_proposed,
        )


class RankError(TandemError):
    """Error of a rank in another process, which failed or ended. The text names it."""


Planned = SchedulerOutput | TokenMasks | MoveMemory | Profile
ToRank = Start | Planned
FromRank = Started | StepResult | MemoryMoved | Profiled | Failed
_encoder = msgspec.msgpack.Encoder()
_start = msgspec.msgpack.Decoder(Start)
_plan: msgspec.msgpack.Decoder[Planned] = msgspec.msgpack.Decoder(
    Planned  # a map; arrays have tags
)
_from_rank = msgspec.msgpack.Decoder(FromRank)


def encode(message: ToRank | FromRank) -> bytes:
    """Encode any of the messages."""
    return _encoder.encode(message)


def decode_start(data: bytes) -> Start:
    """Decode the first frame to a rank."""
    return _start.decode(data)


def decode_plan(data: bytes) -> Planned:
    """Decode any later frame to a rank."""
    return _plan.decode(data)


def decode_from_rank(data: bytes) -> FromRank:
    """Decode any frame of a rank."""
    message: FromRank = _from_rank.decode(data)
    return message


def failed(error: Exception) -> Failed:
    """Return the message of an error."""
    param = None
    if isinstance(error, InvalidParameter):
        param = (error.param, shown(error.value), error.allowed)
    return Failed(type(error).__name__, str(error), isinstance(error, GroupError), param)


class _Shown:
    """Value known only as text."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def error_of(failure: Failed, rank: int) -> TandemError:
    """Return the error to raise here: InvalidParameter for a wrong setting, else RankError."""
    if failure.param is not None:
        param, value, allowed = failure.param
        shown: Any = _Shown(value)
        return InvalidParameter(param, shown, allowed)
    return RankError(f"rank {rank}: {failure.kind}: {failure.text}")
