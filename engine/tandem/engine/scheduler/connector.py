"""The scheduler's hook for KV that comes from or goes to somewhere else.

Engine owns this seam and knows nothing of peers or bytes: a hand-off (prefill/, decode/) and an
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
    """Whether KV of a request lies elsewhere."""

    NOTHING = "nothing"
    """Compute it here, like any other."""
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
    """Whether it comes within steps, from an ``InStepConnector``."""
    announced: bool = False
    """Of LATER: an ``Announced`` follows when there is more to say, and nobody need ask before."""
    lent: bool = False
    """Of LATER: a peer was asked, and what it lends is held there until it is read."""

    @property
    def brings(self) -> bool:
        """Whether KV is to come: who waits for a place under a quota alone is computed here."""
        return self.lookup is Lookup.READY or self.announced or self.lent


@dataclass(frozen=True, slots=True)
class Loaded:
    """The request's remote KV is committed: it may run and its full blocks may be cached."""

    key: RequestKey
    first: tuple[FirstToken, ...]
    """Token 1 of each choice; the scheduler emits it again as this worker's first frame. () when
    it is to be drawn here."""
    usable: bool = True
    """False: token 1 ended every choice, so no KV was brought; the blocks are freed, not cached."""
    blocks_free: bool = True
    """False (only with ``usable=False``): writes may still land; a ``Released`` follows."""
    notes: tuple[Note, ...] = ()
    """Where the time of the load went, on this process's monotonic clock."""


@dataclass(frozen=True, slots=True)
class Announced:
    """``lookup`` has something new to say of the request."""

    key: RequestKey


@dataclass(frozen=True, slots=True)
class LoadMissed:
    """The load failed and nothing but time is lost: the request is computed here. Its blocks are
    written by nobody any more. Whoever says this answers ``lookup`` with NOTHING for the key from
    then on, or the request would be sent to load for ever."""

    key: RequestKey


Event = Loaded | LoadMissed | LoadFailed | Released | Announced
"""What a connector may say."""


class Hold(Enum):
    """Who frees a finished request's blocks."""

    FREE = "free"
    """The engine, now."""
    KEPT = "kept"
    """The connector promised them to somebody; a ``Released`` follows."""


class KVConnector(Protocol):
    """Called by the scheduler in its step loop, in this order for one request."""

    def admit(self, request: Request) -> Refusal | None:
        """Once, before the request is queued: a quota may refuse it, nothing is held yet."""
        ...

    def lookup(self, request: Request, num_local: int) -> Remote:
        """Each step while the request waits, unless the answer was ``announced``; ``num_local``
        tokens are cached here. Who has nothing to bring beyond them says NOTHING, and the next
        connector is asked."""
        ...

    def begin_load(self, request: Request, block_ids: Sequence[int], tokens: range) -> None:
        """Once: ``block_ids`` (the whole table, hits first) are reserved; bring ``tokens``.

        An empty range is a full hit: only token 1 is wanted. Until ``Loaded`` or ``LoadFailed``
        the engine neither reads nor frees the blocks.
        """
        ...

    def started(self, request: Request) -> None:
        """The request has blocks for its whole prompt, and the coming step computes the first of it
        here; again after a preemption."""
        ...

    def computed(
        self, request: Request, block_ids: Sequence[int], tokens: range, done: Fence
    ) -> None:
        """For each step that computed prompt ``tokens`` here (a cached prefix comes first, with the
        first chunk), as soon as their KV is written or will be within moments: maybe before the
        step's result. ``done`` fences all of them; nothing may be announced before it."""
        ...

    def first_tokens(
        self, request: Request, first: Sequence[FirstToken], finish: str | None
    ) -> None:
        """After the prompt's last chunk: token 1 of each choice as drawn here. ``finish`` is the
        reason if token 1 ended the request (every choice)."""
        ...

    def finished(self, request: Request, why: str) -> Hold:
        """Exactly once for every admitted request, when the scheduler lets go of it."""
        ...

    def cancelled(self, key: RequestKey) -> None:
        """The router wants no more of a key that the engine no longer has, or never had: what is
        still promised to a peer under it ends now."""
        ...

    def poll(self) -> Sequence[Event]:
        """Once a step: what happened since."""
        ...

    def has_pending(self) -> bool:
        """Whether anything is promised or on its way (keeps the step loop awake)."""
        ...


@runtime_checkable
class ComposedConnector(KVConnector, Protocol):
    """Several connectors behind the face of one."""

    def lookup_again(self, request: Request, num_local: int) -> Remote:
        """Of a parked request: ``lookup`` of whoever said LATER alone. After its NOTHING the
        request goes back to the queue, where the others are asked in its turn."""
        ...


@runtime_checkable
class InStepConnector(KVConnector, Protocol):
    """A connector whose blocks are moved by the ranks, in order with their steps: what a step
    carries runs behind all that earlier steps write and before what later ones do. Hands nothing
    over to peers, and loads for requests alone that are the only sequence of their key."""

    @property
    def queued(self) -> bool:
        """Whether the next step has something to carry. Blocks that were taken since the last one
        may be written out of order with steps only once that next one is through, and its fence is
        done."""
        ...

    def transfers(self, *, idle: bool) -> BlockTransfers | None:
        """Once a plan: what it carries. ``idle`` says that it computes nothing, and is only made
        if this is something: then a load under way is reason enough."""
        ...

    def moved(self, report: TransferReport) -> None:
        """What a step's result said."""
        ...
