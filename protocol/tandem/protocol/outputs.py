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
    """Reason for the end of a choice at its last token."""

    reason: FinishReason
    stop_token: int | None = None
    """Stop id that ended it; None for end-of-sequence and for length."""


def finish_of(
    params: SamplingParams,
    eos_token_ids: Container[int],
    token: int,
    *,
    num_emitted: int,
    num_prompt: int,
    max_model_len: int,
) -> Finish | None:
    """Return how the output ends with ``token``, its ``num_emitted``-th (counted from 1), or None.

    End-of-sequence has precedence over a stop id, and both over length. Neither of them counts
    before ``min_tokens``. The sampler masks them there, but a forced prefix may contain one.
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
    """Log-probabilities at one position, natural logarithm, of the raw logits."""

    token_id: int
    logprob: float
    rank: int
    """1 for the best token of the vocabulary."""
    top_ids: tuple[int, ...] = ()
    """Best tokens, best first, as many as requested."""
    top_logprobs: tuple[float, ...] = ()


class EngineCoreOutput(msgspec.Struct, array_like=True, frozen=True, gc=False, tag=0):
    """Tokens of one choice from one engine step.

    The router keeps a log by (choice, position). The first output for a position is kept, so token
    1 may come from the prefill worker and again from the decode worker.
    """

    request: str
    attempt: int
    choice: int
    position: int
    """Output position (from 0) of the first of ``token_ids``."""
    token_ids: tuple[int, ...]
    finish: FinishReason | None = None
    stop_token: int | None = None
    """The stop id that ended it, if one did."""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """One per token, if requested."""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """Once, before or with the first token: one per prompt token, None for the first."""
    num_cached_tokens: int | None = None
    """Prompt tokens that were not computed for this request; with the first token."""


class PooledOutput(msgspec.Struct, array_like=True, frozen=True, gc=False, tag=1):
    """Complete answer to a pooled request: a vector and no tokens."""

    request: str
    attempt: int
    values: bytes
    """float32, little-endian."""
    num_prompt_tokens: int
    num_cached_tokens: int
    """Prompt tokens that were not computed for this request."""
    choice: int = 0
    """Always 0: a pooled request has one choice."""
    finish: FinishReason = FinishReason.STOP

    @property
    def vector(self) -> list[float]:
        """Return the values as a list of floats."""
        found = array("f", self.values)
        if sys.byteorder == "big":
            found.byteswap()
        return found.tolist()


EngineOutput = EngineCoreOutput | PooledOutput
"""Output of an engine: tokens of a choice, or a vector."""

_OUTPUT_BYTES = 256
"""Bytes of an output's names and numbers in a frame."""
_TOKEN_ID_BYTES = 5
_LOGPROBS_BYTES = 30
"""Maximum number of bytes of one ``TokenLogprobs``, without its best tokens."""
_TOP_BYTES = 14
"""Maximum number of bytes of each best token."""


def top_within(limit: int, positions: int) -> int | None:
    """Return how many best tokens per position fit ``limit`` bytes of a frame. None if not even the
    positions' own tokens fit."""
    room = limit // positions - _LOGPROBS_BYTES
    return room // _TOP_BYTES if room >= 0 else None


def frame_bytes(output: EngineOutput) -> int:
    """Return the approximate bytes of an output in a frame, rounded up. Takes constant time: all
    positions have as many log-probabilities."""
    if isinstance(output, PooledOutput):
        return _OUTPUT_BYTES + len(output.values)
    size = _OUTPUT_BYTES + _TOKEN_ID_BYTES * len(output.token_ids)
    for told in (output.logprobs, output.prompt_logprobs):
        if told:
            last = told[-1]  # of a prompt's, the first is None
            top = 0 if last is None else len(last.top_ids)
            size += len(told) * (_LOGPROBS_BYTES + _TOP_BYTES * top)
    return size


class Accepted(msgspec.Struct, array_like=True, frozen=True):
    """The worker accepted the request; sent before any work."""

    request: str
    attempt: int


class Refused(msgspec.Struct, array_like=True, frozen=True):
    """The worker did not take the request; nothing was done, nothing is held."""

    request: str
    attempt: int
    refusal: Refusal


class Failed(msgspec.Struct, array_like=True, frozen=True):
    """The attempt ended here; the worker holds nothing more of it."""

    request: str
    attempt: int
    cause: FailCause
    message: str


class BlockEvents(msgspec.Struct, array_like=True, frozen=True):
    """Changes of a worker's prefix cache since the last frame, for the router's index."""

    stored: tuple[BlockHash, ...] = ()
    removed: tuple[BlockHash, ...] = ()
    cleared: bool = False
    """Everything was dropped, before ``stored`` of this message."""
