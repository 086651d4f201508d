"""What an engine and a hand-off say to each other of a request's KV: one set of words for both.

Neither imports the other: prefill/ and decode/ bring them together, and pass these on as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Protocol

import msgspec
from msgspec import Meta

from tandem.protocol.errors import FailCause
from tandem.protocol.ids import RequestKey
from tandem.protocol.messages import Count
from tandem.protocol.outputs import TokenLogprobs


class Fence(Protocol):
    """Completion of the KV writes of a step on all ranks, as the host can see it."""

    def done(self) -> bool:
        """Whether every write has landed. Never blocks."""
        ...


class FirstToken(msgspec.Struct, frozen=True, array_like=True):
    """Token 1 of one choice, as the prefill worker drew it; also on the wire between workers."""

    choice: Annotated[int, Meta(ge=0, le=1 << 24)]
    token_id: Count
    logprobs: TokenLogprobs | None = None


MAX_FIRST_BYTES = 1 << 19
"""Of the first tokens of all choices, by ``first_bytes``: beyond that none are handed over. What
workers say to each other in a message may be twice as long."""
_BYTES_OF_A_LOGPROB = 16
"""Of an id and its log-probability on the wire, at most."""


def first_bytes(n: int, logprobs: int) -> int:
    """What the first tokens of ``n`` choices take on the wire at most, with so many
    log-probabilities each."""
    return n * (logprobs + 1) * _BYTES_OF_A_LOGPROB


@dataclass(frozen=True, slots=True)
class Released:
    """Blocks that the engine left with a hand-off under this key are the engine's again: once for
    every key that it let go of without having its blocks back."""

    key: RequestKey


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """The hand-off failed; the key's blocks hold nothing to use or cache. A producer's revoked
    export, too: what the engine still computes of it is given up."""

    key: RequestKey
    cause: FailCause
    message: str
    blocks_free: bool = True
    """False: writes may still land; a ``Released`` with the same key follows."""
