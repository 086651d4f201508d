"""Types of identifiers in messages: incarnations, request keys, block hashes."""

import os
from typing import Annotated, NewType

import msgspec
from msgspec import Meta

Incarnation = NewType("Incarnation", bytes)
"""128 random bits, drawn at each process start."""

BlockHash = NewType("BlockHash", bytes)
"""Chained 128-bit hash of a full block and all that precedes it."""

INCARNATION_BYTES = 16
MAX_REQUEST_NAME = 256
"""Maximum characters of a name."""
_PULL = "<"
"""Prefix of pull keys; names of requests never begin with it."""
NO_INCARNATION = Incarnation(bytes(INCARNATION_BYTES))
"""Destination of frames before the peer's incarnation is known."""


def new_incarnation() -> Incarnation:
    """Draw the incarnation of this process, once."""
    return Incarnation(os.urandom(INCARNATION_BYTES))


class RequestKey(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Identity of one attempt at one request; equal on P, D and the router."""

    router: Annotated[bytes, Meta(max_length=INCARNATION_BYTES)]
    """Incarnation of the router that dispatched it; request ids are unique within one."""
    request: Annotated[str, Meta(max_length=MAX_REQUEST_NAME)]
    """Id that the router gave to the request (never the client's)."""
    attempt: Annotated[int, Meta(ge=0, le=1 << 40)]
    """0 for the first dispatch; each walk of the failure retry policy adds one."""

    def __str__(self) -> str:
        return f"{self.request}/{self.attempt}@{self.router.hex()[:8]}"

    @property
    def for_pull(self) -> "RequestKey":
        """Return the key under which the request's prefix is pulled from a peer. It differs from
        ``self`` because the same two workers may have a hand-off of the request under ``self``."""
        return RequestKey(self.router, _PULL + self.request[: MAX_REQUEST_NAME - 1], self.attempt)

    @property
    def is_pull(self) -> bool:
        """Return whether the key was made by ``for_pull``."""
        return self.request.startswith(_PULL)
