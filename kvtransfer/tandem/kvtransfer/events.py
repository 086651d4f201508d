"""Events of hand-offs for the engine's thread, polled once a step; made by the transfer thread."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.protocol.errors import FailCause
from tandem.protocol.ids import BlockHash, Incarnation, RequestKey
from tandem.protocol.kv import Fence, FirstToken, LoadFailed, Released
from tandem.protocol.timeline import Note

__all__ = [
    "BlocksFree",
    "Cancelled",
    "ConsumerEvent",
    "Fence",
    "FirstTokenEnded",
    "LoadFailed",
    "Loaded",
    "ProducerEvent",
    "Ready",
    "Released",
    "Revoked",
    "Wanted",
]


@dataclass(frozen=True, slots=True)
class Revoked:
    """Producer: the export ended without success while the engine computes it.

    ``Released`` still follows ``finished(key)``.
    """

    key: RequestKey
    cause: FailCause
    message: str


@dataclass(frozen=True, slots=True)
class Wanted:
    """Producer: a peer asks for cached blocks. The answer is ``admit`` (with the rest at once) or
    ``refuse``, before a deadline."""

    key: RequestKey
    consumer: Incarnation
    hashes: tuple[BlockHash, ...]
    budget_ms: int


@dataclass(frozen=True, slots=True)
class Ready:
    """Consumer: P has begun (once per key): reserve, then ``begin_load``."""

    key: RequestKey
    num_tokens: int
    """Tokens from the start of the prompt whose KV P will deliver in total."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """Consumer: committed; the blocks may be used and cached. Ends the key."""

    key: RequestKey
    first: tuple[FirstToken, ...]
    """Token 1 of each choice, as P drew it."""
    notes: tuple[Note, ...] = ()
    """Times of the phases, on this process's monotonic clock."""


@dataclass(frozen=True, slots=True)
class FirstTokenEnded:
    """Consumer: token 1 ended the request, so its KV is not needed. Ends the key.

    The blocks of ``begin_load`` hold nothing to use or cache.
    """

    key: RequestKey
    first: tuple[FirstToken, ...]
    finish: str
    blocks_free: bool = True
    """False: an unpack still writes; ``BlocksFree`` follows."""


@dataclass(frozen=True, slots=True)
class Cancelled:
    """Consumer: ``cancel(key)`` took effect. Ends the key."""

    key: RequestKey
    blocks_free: bool = True


@dataclass(frozen=True, slots=True)
class BlocksFree:
    """Consumer: nothing writes the key's blocks any more (after ``blocks_free=False``)."""

    key: RequestKey


ProducerEvent = Released | Revoked | Wanted
ConsumerEvent = Ready | Loaded | FirstTokenEnded | LoadFailed | Cancelled | BlocksFree
