"""Items of D's transfer thread: requests of the engine, and messages of links."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.kvtransfer.control.mail import FromPeer, LinkDown, LinkUp
from tandem.kvtransfer.handoff import pull as d_events
from tandem.protocol.ids import BlockHash, RequestKey


@dataclass(frozen=True, slots=True)
class Reserved:
    """The engine has blocks: bring tokens [from_token, to_token) into them."""

    key: RequestKey
    block_ids: tuple[int, ...]
    from_token: int
    to_token: int
    hashes: tuple[BlockHash, ...] = ()
    """Hashes of the full blocks, if tags are compared."""


@dataclass(frozen=True, slots=True)
class SleepState:
    """Sleep state of the engine: no items of it arrive while it sleeps."""

    asleep: bool


FromEngine = d_events.Opened | Reserved | d_events.Cancel | SleepState
ConsumerItem = FromEngine | LinkUp | LinkDown | FromPeer
