"""Events of hand-offs for the engine's thread, polled once a step; made by the transfer thread."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.protocol.ids import BlockHash, Incarnation, RequestKey
from tandem.protocol.kv import Loaded, LoadFailed, Ready, Released

__all__ = [
    "Cancelled",
    "ConsumerEvent",
    "LoadFailed",
    "Loaded",
    "ProducerEvent",
    "Ready",
    "Released",
    "Wanted",
]


@dataclass(frozen=True, slots=True)
class Wanted:
    """Producer: a peer asks for cached blocks. The answer is ``admit`` (with the rest at once) or
    ``refuse``, before a deadline."""

    key: RequestKey
    consumer: Incarnation
    hashes: tuple[BlockHash, ...]
    budget_ms: int


@dataclass(frozen=True, slots=True)
class Cancelled:
    """Consumer: ``cancel(key)`` took effect. Ends the key."""

    key: RequestKey
    blocks_free: bool = True


ProducerEvent = Released | LoadFailed | Wanted
ConsumerEvent = Ready | Loaded | LoadFailed | Cancelled | Released
