"""Interface of the scheduler for KV that is loaded from, or sent to, another place.

Hand-offs, pulls and the offload tier implement it. Every method is called in the step loop and
never blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, runtime_checkable

from tandem.engine.request import Request
from tandem.engine.step import BlockTransfers, TransferReport
from tandem.protocol.errors import Refusal
from tandem.protocol.ids import RequestKey
from tandem.protocol.kv import (
    BlockTables,
    Fence,
    FirstToken,
    Loaded,
    LoadFailed,
    Ready,
    Released,
)


class Lookup(Enum):
    """Availability of a request's KV elsewhere."""

    NOTHING = "nothing"
    """No KV elsewhere: compute it here."""
    LATER = "later"
    """KV will come, or none may be computed yet: park the request and ask again later."""
    READY = "ready"
    """KV comes now: reserve blocks and call ``begin_load``."""


@dataclass(frozen=True, slots=True)
class Remote:
    """Answer of ``lookup``."""

    lookup: Lookup
    num_tokens: int = 0
    """Tokens from the start of the prompt whose KV will be delivered (READY)."""
    in_step: bool = False
    """Whether the KV comes within steps, from an ``InStepConnector``."""
    announced: bool = False
    """Only for LATER: a ``Ready`` follows any change, so no lookup is needed before it."""
    lent: bool = False
    """Only for LATER: a peer holds what it lends until it is read."""

    @property
    def brings(self) -> bool:
        """Return whether KV is to come; False if the request waits for a quota only."""
        return self.lookup is Lookup.READY or self.announced or self.lent


@dataclass(frozen=True, slots=True)
class LoadMissed:
    """Event: the load failed, nothing writes the blocks, and the request is computed here.
    ``lookup`` must return NOTHING for the key from then on."""

    key: RequestKey


Event = Ready | Loaded | LoadMissed | LoadFailed | Released


class Hold(Enum):
    """Side that frees a finished request's blocks."""

    FREE = "free"
    """The engine, now."""
    KEPT = "kept"
    """The connector, which promised them to a peer; a ``Released`` follows."""


class KVConnector(Protocol):
    """Connector; its methods are called in this order for one request."""

    def admit(self, request: Request) -> Refusal | None:
        """Return a refusal, as by a quota. Called once, before the request is queued."""
        ...

    def lookup(self, request: Request, num_local: int) -> Remote:
        """Return the availability of a waiting request's KV; ``num_local`` tokens are cached here.
        Called each step unless the answer was ``announced``. NOTHING also if there is no KV beyond
        the cached."""
        ...

    def begin_load(self, request: Request, tables: BlockTables, tokens: range) -> None:
        """Start to load ``tokens`` into ``tables`` (whole ones, by group, hits first). Called once.

        An empty range is a full hit: only token 1 is missing. Until ``Loaded`` or ``LoadFailed``
        the engine neither reads nor frees the blocks.
        """
        ...

    def started(self, request: Request) -> None:
        """Note that the request has blocks for its whole prompt and is computed with the coming
        step. Called again after a preemption."""
        ...

    def computed(self, request: Request, tables: BlockTables, tokens: range, done: Fence) -> None:
        """Note prompt ``tokens`` computed by one step (a cached prefix is part of the first chunk).
        Maybe called before the step's result; nothing may be announced before ``done``."""
        ...

    def first_tokens(
        self, request: Request, first: Sequence[FirstToken], finish: str | None
    ) -> None:
        """Take token 1 of each choice, after the prompt's last chunk. ``finish`` is the reason if
        it ended every choice."""
        ...

    def finished(self, request: Request, why: str) -> Hold:
        """Return which side frees the blocks. Called once for every admitted request, at its
        end."""
        ...

    def cancelled(self, key: RequestKey) -> None:
        """End promises to a peer under a key that the router cancelled; it may be unknown."""
        ...

    def poll(self) -> Sequence[Event]:
        """Return the events since the last call. Called once a step."""
        ...

    def has_pending(self) -> bool:
        """Return whether a promise or transfer is open, which keeps the step loop awake."""
        ...


@runtime_checkable
class ComposedConnector(KVConnector, Protocol):
    """Several connectors with the interface of one."""

    def lookup_again(self, request: Request, num_local: int) -> Remote:
        """Return ``lookup`` of the connector that answered LATER for a parked request. After
        NOTHING the request is queued, and other connectors are asked in its turn."""
        ...


@runtime_checkable
class InStepConnector(KVConnector, Protocol):
    """Connector whose blocks the ranks move between steps.

    Transfers run after earlier steps' writes and before later steps'. It loads only for single
    sequences, and hands nothing over.
    """

    @property
    def queued(self) -> bool:
        """Return whether the next step has transfers. Blocks taken since the last step may be
        written out of order only after that next step's fence."""
        ...

    def transfers(self, *, idle: bool) -> BlockTransfers | None:
        """Return the transfers of a plan; called once for each. ``idle``: the plan computes
        nothing; a load in progress is then enough."""
        ...

    def moved(self, report: TransferReport) -> None:
        """Take the transfer report of a step's result."""
        ...
