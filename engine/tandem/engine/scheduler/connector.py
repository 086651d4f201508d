"""The scheduler's interface for KV that is loaded from, or sent to, another place.

The engine owns it and knows nothing of peers or bytes: a hand-off (prefill/, decode/) and an
offload tier each implement it. Every method is called in the step loop and never blocks.
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
from tandem.protocol.kv import Fence, FirstToken, LoadFailed, Released
from tandem.protocol.timeline import Note


class Lookup(Enum):
    """Answers to whether KV of a request is stored elsewhere."""

    NOTHING = "nothing"
    """No KV elsewhere: compute it here."""
    LATER = "later"
    """KV will come, or none may be computed yet: park the request outside the waiting queue and ask
    again later."""
    READY = "ready"
    """KV comes now: reserve blocks and call ``begin_load``."""


@dataclass(frozen=True, slots=True)
class Remote:
    """Answer of ``lookup``."""

    lookup: Lookup
    num_tokens: int = 0
    """Tokens from the start of the prompt whose KV the other side will deliver (READY)."""
    in_step: bool = False
    """True if the KV comes within steps, from an ``InStepConnector``."""
    announced: bool = False
    """Only for LATER: an ``Announced`` follows any change, so no lookup is needed before it."""
    lent: bool = False
    """Only for LATER: a peer was asked, and holds what it lends until it is read."""

    @property
    def brings(self) -> bool:
        """Return whether KV is to come. A request that only waits for a quota is computed here."""
        return self.lookup is Lookup.READY or self.announced or self.lent


@dataclass(frozen=True, slots=True)
class Loaded:
    """The request's remote KV is committed: it may run and its full blocks may be cached."""

    key: RequestKey
    first: tuple[FirstToken, ...]
    """Token 1 of each choice; the scheduler emits it again as this worker's first frame. Empty if
    it is to be drawn here."""
    usable: bool = True
    """False: token 1 ended every choice, so no KV came; the blocks are freed, not cached."""
    blocks_free: bool = True
    """False (only with ``usable=False``): writes may still land; a ``Released`` follows."""
    notes: tuple[Note, ...] = ()
    """Times of the load's parts, on this process's monotonic clock."""


@dataclass(frozen=True, slots=True)
class Announced:
    """The answer of ``lookup`` for the request has changed."""

    key: RequestKey


@dataclass(frozen=True, slots=True)
class LoadMissed:
    """The load failed without damage: the request is computed here, and its blocks are no longer
    written. The connector answers ``lookup`` with NOTHING for the key from then on; otherwise the
    request would load forever."""

    key: RequestKey


Event = Loaded | LoadMissed | LoadFailed | Released | Announced
"""An event that a connector may report."""


class Hold(Enum):
    """Which side frees a finished request's blocks."""

    FREE = "free"
    """The engine, now."""
    KEPT = "kept"
    """The connector promised them to a peer; a ``Released`` follows."""


class KVConnector(Protocol):
    """A connector; the scheduler calls it in its step loop, in this order for one request."""

    def admit(self, request: Request) -> Refusal | None:
        """Return a refusal, as by a quota. Called once, before the request is queued or holds
        anything."""
        ...

    def lookup(self, request: Request, num_local: int) -> Remote:
        """Return the availability of a waiting request's KV; ``num_local`` tokens are cached here.
        Called each step unless the answer was ``announced``. On NOTHING, which means no KV beyond
        the cached, the next connector is asked."""
        ...

    def begin_load(self, request: Request, block_ids: Sequence[int], tokens: range) -> None:
        """Start to bring ``tokens`` into ``block_ids`` (the whole table, hits first). Called once.

        An empty range is a full hit: only token 1 is missing. Until ``Loaded`` or ``LoadFailed``
        the engine neither reads nor frees the blocks.
        """
        ...

    def started(self, request: Request) -> None:
        """Note that the request has blocks for its whole prompt, and that the coming step computes
        its first tokens here. Called again after a preemption."""
        ...

    def computed(
        self, request: Request, block_ids: Sequence[int], tokens: range, done: Fence
    ) -> None:
        """Note prompt ``tokens`` computed here by one step (a cached prefix comes with the first
        chunk). Called when their KV is written or soon will be, maybe before the step's result.
        ``done`` fences all of them; nothing may be announced before it."""
        ...

    def first_tokens(
        self, request: Request, first: Sequence[FirstToken], finish: str | None
    ) -> None:
        """Take token 1 of each choice as drawn here, after the prompt's last chunk. ``finish`` is
        the reason if token 1 ended the request (every choice)."""
        ...

    def finished(self, request: Request, why: str) -> Hold:
        """Return which side frees the blocks. Called once for every admitted request, at its
        end."""
        ...

    def cancelled(self, key: RequestKey) -> None:
        """End what is promised to a peer under a key that the router cancelled, and that the engine
        no longer has or never had."""
        ...

    def poll(self) -> Sequence[Event]:
        """Return the events since the last call. Called once a step."""
        ...

    def has_pending(self) -> bool:
        """Return whether anything is promised or in transfer (keeps the step loop awake)."""
        ...


@runtime_checkable
class ComposedConnector(KVConnector, Protocol):
    """Several connectors with the interface of one."""

    def lookup_again(self, request: Request, num_local: int) -> Remote:
        """Return ``lookup`` of the connector alone that answered LATER for a parked request. After
        NOTHING the request is queued again; the other connectors are asked in its turn."""
        ...


@runtime_checkable
class InStepConnector(KVConnector, Protocol):
    """A connector whose blocks are moved by the ranks, in order with their steps. Its transfers run
    after all writes of earlier steps and before those of later steps. It hands nothing over to
    peers, and loads only for requests that are the only sequence of their key."""

    @property
    def queued(self) -> bool:
        """Return whether the next step has transfers. Blocks taken since the last step may be
        written out of order only once that next step has ended and its fence is done."""
        ...

    def transfers(self, *, idle: bool) -> BlockTransfers | None:
        """Return the transfers of a plan; called once for each. ``idle``: the plan computes
        nothing, and is made only for transfers; a load in progress is then enough."""
        ...

    def moved(self, report: TransferReport) -> None:
        """Take the transfer report of a step's result."""
        ...
