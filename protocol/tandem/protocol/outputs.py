"""Messages of a worker about a running request."""

import sys
from array import array
from collections.abc import Container
from enum import StrEnum
from typing import NamedTuple

import msgspec

from tandem.protocol.errors import FailCause, Refusal
from tandem.protocol.ids import BlockHash
from tandem.protocol.sampling import SamplingParams


class FinishReason(StrEnum):
    """Reasons for the end of a choice, with OpenAI's names if it has them."""

    STOP = "stop"
    """The end-of-sequence token, a stop token or a stop string."""
    LENGTH = "length"
    """max_tokens, or the end of the model's context."""
    ABORT = "abort"
    """The client disconnected, or the deadline passed."""
    ERROR = "error"
    """No worker could finish the request; an error has the reason."""


class Finish(NamedTuple):
    """Reason for the end of a choice."""

    reason: FinishReason
    stop_token: int | None = None
    """Stop id that ended it, else None."""


def finish_of(
    params: SamplingParams,
    eos_token_ids: Container[int],
    token: int,
    *,
    num_emitted: int,
    num_prompt: int,
    max_model_len: int,
) -> Finish | None:
    """Return the end of the output at ``token``, its ``num_emitted``-th, or None.

    End-of-sequence has precedence over a stop id, and both over length. Neither counts before
    ``min_tokens``; forced prefixes may contain them.
    """
    if num_emitted >= params.min_tokens:
        if not params.ignore_eos and token in eos_token_ids:
            return Finish(FinishReason.STOP)
        if token in params.stop_token_ids:
            return Finish(FinishReason.STOP, token)
    if params.max_tokens is not None and num_emitted >= params.max_tokens:
        return Finish(FinishReason.LENGTH)
    if num_prompt + num_emitted >= max_model_len:
        return Finish(FinishReason.LENGTH)
    return None


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural log-probabilities of the raw logits at one position."""

    token_id: int
    logprob: float
    rank: int
    """Rank in the vocabulary, from 1."""
    top_ids: tuple[int, ...] = ()
    """Requested best tokens, best first."""
    top_logprobs: tuple[float, ...] = ()


class EngineCoreOutput(msgspec.Struct, array_like=True, frozen=True, gc=False, tag=0):
    """Tokens of one choice from one engine step.

    The first output for a position counts: token 1 may come from both workers of a hand-off.
    """

    request: str
    attempt: int
    choice: int
    position: int
    """Output position of the first token, from 0."""
    token_ids: tuple[int, ...]
    finish: FinishReason | None = None
    stop_token: int | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """One per token, if requested."""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """One per prompt token, None for the first; sent once, with or before the first token."""
    num_cached_tokens: int | None = None
    """Prompt tokens that were not computed; sent with the first token."""


class PooledOutput(msgspec.Struct, array_like=True, frozen=True, gc=False, tag=1):
    """Complete answer to a pooled request."""

    request: str
    attempt: int
    values: bytes
    """float32, little-endian."""
    num_prompt_tokens: int
    num_cached_tokens: int
    """Prompt tokens that were not computed."""
    choice: int = 0
    finish: FinishReason = FinishReason.STOP

    @property
    def vector(self) -> list[float]:
        found = array("f", self.values)
        if sys.byteorder == "big":
            found.byteswap()
        return found.tolist()


EngineOutput = EngineCoreOutput | PooledOutput

_OUTPUT_BYTES = 256
_TOKEN_ID_BYTES = 5
_LOGPROBS_BYTES = 30
"""Maximum bytes of one ``TokenLogprobs`` without best tokens."""
_TOP_BYTES = 14
"""Maximum bytes of a best token."""


def top_within(limit: int, positions: int) -> int | None:
    """Return the number of best tokens per position that fit ``limit`` bytes; None if none fit."""
    room = limit // positions - _LOGPROBS_BYTES
    return room // _TOP_BYTES if room >= 0 else None


def frame_bytes(output: EngineOutput) -> int:
    """Return the approximate bytes of an output in a frame, in constant time."""
    if isinstance(output, PooledOutput):
        return _OUTPUT_BYTES + len(output.values)
    size = _OUTPUT_BYTES + _TOKEN_ID_BYTES * len(output.token_ids)
    for logprobs in (output.logprobs, output.prompt_logprobs):
        if logprobs:
            last = logprobs[-1]  # The first of a prompt's is None.
            top = 0 if last is None else len(last.top_ids)
            size += len(logprobs) * (_LOGPROBS_BYTES + _TOP_BYTES * top)
    return size


class Accepted(msgspec.Struct, array_like=True, frozen=True):
    """The worker accepted the request."""

    request: str
    attempt: int


class Refused(msgspec.Struct, array_like=True, frozen=True):
    """The worker refused the request before any work."""

    request: str
    attempt: int
    refusal: Refusal


class Failed(msgspec.Struct, array_like=True, frozen=True):
    """Failure of an attempt; the worker has released its blocks."""

    request: str
    attempt: int
    cause: FailCause
    message: str


class BlockEvents(msgspec.Struct, array_like=True, frozen=True):
    """Changes of a worker's prefix cache since the last frame."""

    stored: tuple[BlockHash, ...] = ()
    removed: tuple[BlockHash, ...] = ()
    cleared: bool = False
    """Whether everything was dropped before ``stored``."""
