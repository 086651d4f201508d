"""What a worker says about a request while it runs."""

import sys
from array import array

import msgspec

from tandem.protocol.errors import FailCause, Refusal
from tandem.protocol.finish import FinishReason
from tandem.protocol.ids import BlockHash


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position, natural logarithm, of the raw logits."""

    token_id: int
    logprob: float
    rank: int
    """1 for the best token of the vocabulary."""
    top_ids: tuple[int, ...] = ()
    """Best tokens, first to last, as many as were asked for."""
    top_logprobs: tuple[float, ...] = ()


class EngineCoreOutput(msgspec.Struct, array_like=True, frozen=True, gc=False, tag=0):
    """Tokens of one choice from one engine step.

    The router keeps a log by (choice, position): whoever writes a position first wins, so
    token 1 may come from P and again from D.
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
    """One per token, when asked for."""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """Once, before or with the first token: one per prompt token, None for the first."""
    num_cached_tokens: int | None = None
    """Prompt tokens that were not computed for this request; with the first token."""


class PooledOutput(msgspec.Struct, array_like=True, frozen=True, gc=False, tag=1):
    """The whole answer to a request that is pooled: a vector, and no token."""

    request: str
    attempt: int
    values: bytes
    """float32, little-endian."""
    num_prompt_tokens: int
    num_cached_tokens: int
    """Prompt tokens that were not computed for this request."""
    choice: int = 0
    """The one there is."""
    finish: FinishReason = FinishReason.STOP

    @property
    def vector(self) -> list[float]:
        """The values as numbers."""
        found = array("f", self.values)
        if sys.byteorder == "big":
            found.byteswap()
        return found.tolist()


EngineOutput = EngineCoreOutput | PooledOutput
"""What an engine answers with: tokens of a choice, or a vector."""


class Accepted(msgspec.Struct, array_like=True, frozen=True):
    """The worker took the request; said before any work."""

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
