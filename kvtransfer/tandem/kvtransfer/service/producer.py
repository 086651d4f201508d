"""Producer: a worker that computes KV and hands it over.

Contract: after ``admit`` returned None, exactly one ``finished``, then exactly one ``Released``
from ``poll``. Until then the engine does not free, move or write the key's blocks, beyond computing
the prompt.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

from prometheus_client import CollectorRegistry
from torch import Tensor

from tandem.kvtransfer.config import KVTransferConfig
from tandem.kvtransfer.control.server import ControlServer
from tandem.kvtransfer.events import ProducerEvent
from tandem.kvtransfer.handoff import export as p_events
from tandem.kvtransfer.handoff.manifest import num_required
from tandem.kvtransfer.handoff.messages import MAX_BLOCKS
from tandem.kvtransfer.mover.producer import Computed, ProducerMover
from tandem.kvtransfer.service.parts import make_parts, tell_transports
from tandem.kvtransfer.transports.base import Transport
from tandem.link.curve import CurveGuard
from tandem.protocol.card import Fingerprint, KVLayout
from tandem.protocol.errors import Refusal, RefusalCode
from tandem.protocol.ids import BlockHash, Incarnation, RequestKey
from tandem.protocol.kv import BlockTables, Fence, FirstToken, Released
from tandem.protocol.messages import PeerHealth


class Quota:
    """Blocks by key, for the engine's thread."""

    def __init__(self, num_blocks: int, share: float, backlog: float) -> None:
        self.limit = max(1, int(num_blocks * share))
        self.backlog = max(self.limit, int(self.limit * backlog))
        self._admitted: dict[RequestKey, int] = {}
        self._started: set[RequestKey] = set()
        self._short = False
        """Whether a hand-off had to wait in this round: later ones must not go before it."""
        self._waiting: set[RequestKey] = set()
        """Keys that had to wait, and have not begun since."""
        self.num_admitted = 0
        """Blocks of all admitted keys."""
        self.num_started = 0

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._admitted

    def __len__(self) -> int:
        return len(self._admitted)

    def admit(self, key: RequestKey, num_blocks: int) -> Refusal | None:
        """Count the key, or return why not."""
        if num_blocks > self.limit:
            message = f"{num_blocks} blocks; hand-offs may hold {self.limit} here in all"
            return Refusal(code=RefusalCode.NEVER_FITS, message=message)
        if self.num_admitted + num_blocks > self.backlog:
            message = f"hand-offs of {self.num_admitted} blocks are admitted, {self.backlog} may be"
            return Refusal(code=RefusalCode.CAPACITY, message=message)
        self._admitted[key] = num_blocks
        self.num_admitted += num_blocks
        return None

    def new_round(self) -> None:
        """Begin a step, in which the callers ask in order of priority."""
        self._short = False

    @property
    def is_short(self) -> bool:
        """Return whether a hand-off waits for leased blocks: optional work should take none."""
        return bool(self._waiting)

    def may_start(self, key: RequestKey) -> bool:
        """Return whether the key's blocks fit under the limit, and reserve them. After the first
        False of a round all others wait, so that a large one does not starve."""
        if key in self._started or key not in self._admitted:
            return True
        if self._short or self.num_started + self._admitted[key] > self.limit:
            self._short = True
            self._waiting.add(key)
            return False
        self.start(key)
        return True

    def start(self, key: RequestKey) -> None:
        if key in self._admitted and key not in self._started:
            self._started.add(key)
            self._waiting.discard(key)
            self.num_started += self._admitted[key]

    def release(self, key: RequestKey) -> None:
        num_blocks = self._admitted.pop(key, 0)
        self.num_admitted -= num_blocks
        if key in self._started:
            self._started.discard(key)
            self.num_started -= num_blocks
        self._waiting.discard(key)
        self._short = False


ANY_LENGTH = 2**40
"""More tokens than any prompt has."""
MAX_PAST = 4096
"""Ended or cancelled keys that ``admit`` refuses at once (the table refuses older ones)."""


class HandoffProducer:
    """Producer; all methods are for the engine's thread and return at once."""

    def __init__(
        self,
        config: KVTransferConfig,
        *,
        kv_cache: Tensor,
        layout: KVLayout,
        num_blocks: int,
        fingerprint: Fingerprint,
        incarnation: Incarnation,
        registry: CollectorRegistry,
        notify: Callable[[], None],
        transports: dict[str, Transport] | None = None,
        guard: CurveGuard | None = None,
        kv_scales: Sequence[Sequence[float]] | None = None,
    ) -> None:
        """``kv_cache``: dense memory of ``num_blocks`` blocks, any dtype. ``notify`` is called on
        another thread whenever ``poll`` has something; ``guard`` refuses unknown keys.
        ``kv_scales``: the model's scales of codes, one for each of a group's ``num_rows``; None is
        1. Raises TransportError, AddressInUse."""
        parts = make_parts(
            config,
            "producer",
            kv_cache=kv_cache,
            layout=layout,
            num_blocks=num_blocks,
            fingerprint=fingerprint,
            incarnation=incarnation,
            registry=registry,
            notify=notify,
            transports=transports,
            kv_scales=kv_scales,
        )
        self._board, self._metrics = parts.board, parts.metrics
        wanted = next(iter(parts.transports))
        self._mover = ProducerMover(parts)  # removes transports that cannot be served
        tell_transports(parts, "producer", wanted)
        self._wants_hashes = bool(parts.direct)
        self._only_copies = len(parts.direct) == len(parts.transports)
        """Whether peers copy blocks over every possible link."""
        found = parts.direct.items()
        self._mapped = [name for name, each in found if each.traits.maps_memory]
        self._channel = ControlServer(
            config,
            incarnation,
            parts.fingerprint.compatibility,
            board=parts.board,
            metrics=parts.metrics,
            deliver=self._mover.inbox.put,
            offer=self._mover.inbox.offer,
            guard=guard,
            welcome=self._mover.welcome,
        )
        self._mover.control = self._channel
        self._layout = layout
        self._quota = Quota(num_blocks, config.kv_lease_quota, config.kv_lease_backlog)
        self._finished: set[RequestKey] = set()
        self._past: OrderedDict[RequestKey, str] = OrderedDict()

    @property
    def control(self) -> str:
        """Return ``host:port`` of the control socket, as peers reach it."""
        return self._channel.endpoint

    @property
    def max_blocks(self) -> int:
        """Return the blocks of the largest hand-off that can be admitted."""
        return min(self._quota.limit, MAX_BLOCKS) if self._only_copies else self._quota.limit

    @property
    def max_tokens(self) -> int | None:
        """Return the tokens of the largest hand-off that can be admitted; None for any number, if
        windows bound the KV of all groups."""
        if num_required(self._layout, ANY_LENGTH) <= self.max_blocks:
            return None
        return self.tokens_in(self.max_blocks)

    def tokens_in(self, num_blocks: int) -> int:
        """Return the most tokens, in at most ``num_blocks`` full blocks of each group, whose KV of
        all groups takes at most ``num_blocks``."""
        size = self._layout.block_size
        longest = range(size, (num_blocks + 1) * size, size)
        return size * bisect_right(
            longest, num_blocks, key=lambda tokens: num_required(self._layout, tokens)
        )

    def start(self) -> None:
        self._mover.start()
        self._channel.start()

    def close(self) -> None:
        """End both threads and notify the consumers. May be called twice."""
        self._channel.stop()
        self._mover.stop()

    # One hand-off.

    def admit(
        self,
        key: RequestKey,
        *,
        num_tokens: int,
        consumer: Incarnation,
        budget_ms: int | None,
    ) -> Refusal | None:
        """Promise the KV of the request's first ``num_tokens`` to ``consumer``, or return why not.

        A consumer that requests a refused key gets GONE.
        """
        num_blocks = num_required(self._layout, num_tokens)
        refusal = (
            self._why_not(key, consumer)
            or self._why_too_long(consumer, num_blocks)
            or self._quota.admit(key, num_blocks)
        )
        if refusal is not None:
            if refusal.code is not RefusalCode.DUPLICATE:
                self._mover.inbox.put(p_events.Refuse(key))
            return refusal
        self._mover.inbox.put(p_events.Admit(key, consumer, num_tokens, budget_ms, link_up=True))
        return None

    def refuse(self, key: RequestKey) -> None:
        """Refuse a key that a peer requested (``Wanted``)."""
        self._mover.inbox.put(p_events.Refuse(key))

    def _why_not(self, key: RequestKey, consumer: Incarnation) -> Refusal | None:
        if key in self._quota:
            return Refusal(code=RefusalCode.DUPLICATE, message=f"{key} is being handed over")
        if key in self._past:
            return Refusal(code=RefusalCode.DUPLICATE, message=f"{key} {self._past[key]}")
        if consumer not in self._mover.links:
            message = f"decode worker {consumer.hex()[:8]} has no link to this worker"
            return Refusal(code=RefusalCode.PEER_UNKNOWN, message=message)
        problem = self.problem()
        if problem is not None:
            return Refusal(code=RefusalCode.CAPACITY, message=problem)
        return None

    def _why_too_long(self, consumer: Incarnation, num_blocks: int) -> Refusal | None:
        if num_blocks <= MAX_BLOCKS or not self._mover.copies(consumer):
            return None
        message = f"{num_blocks} blocks; {MAX_BLOCKS} of a hand-off are copied by a peer at most"
        return Refusal(code=RefusalCode.NEVER_FITS, message=message)

    def may_start(self, key: RequestKey) -> bool:
        """Return whether the lease quota has room for the key's blocks; call it each step before
        the key gets blocks. Without a call, ``computed`` counts them over the quota."""
        return self._quota.may_start(key)

    @property
    def wants_hashes(self) -> bool:
        """Return whether ``computed`` requires block hashes: blocks are copied, and have tags."""
        return self._wants_hashes

    def started(self, key: RequestKey) -> None:
        """Report that the key has its blocks, and its first chunk is about to be launched."""
        self._mover.inbox.put(p_events.Begun(key))

    def computed(
        self,
        key: RequestKey,
        tables: BlockTables,
        upto: int,
        fence: Fence,
        hashes: Sequence[BlockHash] = (),
    ) -> None:
        """Report that the blocks of ``tables`` hold tokens [0, upto) once ``fence`` is done.
        ``hashes``, if any, are of all full blocks."""
        self._quota.start(key)
        self._mover.inbox.put(Computed(key, tables, upto, fence, tuple(hashes)))

    def final(self, key: RequestKey, first: Sequence[FirstToken], finish: str | None) -> None:
        """Report token 1 of each choice; ``finish`` if it ended all choices."""
        self._mover.inbox.put(p_events.First(key, tuple(first), finish))

    def cancel(self, key: RequestKey) -> None:
        """Cancel a key. An unknown key is remembered, and refused when it comes."""
        if key not in self._quota:
            self._remember(key, "was cancelled")
        self._mover.inbox.put(p_events.Cancel(key))

    def finished(self, key: RequestKey) -> None:
        """Report the end of the request in the engine; ``Released`` returns the blocks. Without
        ``final`` before it, the export ends."""
        if key in self._quota:
            self._finished.add(key)
            self._mover.inbox.put(p_events.Finished(key, cancelled=False))

    def poll(self) -> list[ProducerEvent]:
        """Return the events since the last call; call it once a step, before ``may_start``."""
        self._quota.new_round()
        polled = self._mover.events()
        if not self._mover.alive:
            polled += [Released(key) for key in self._finished]
        happened: list[ProducerEvent] = []
        for event in polled:
            if isinstance(event, Released):
                if event.key not in self._finished:
                    continue
                self._finished.discard(event.key)
                self._quota.release(event.key)
                self._remember(event.key, "has been handed over")
            happened.append(event)
        self._metrics.leased_blocks.set(self._quota.num_started)
        return happened

    # State.

    @property
    def is_short(self) -> bool:
        """Return whether a hand-off had to wait for the lease quota, and has not begun since."""
        return self._quota.is_short

    def has_pending(self) -> bool:
        return len(self._quota) > 0

    def leased_blocks(self) -> int:
        return self._quota.num_started

    def set_peers(self, controls: Mapping[str, Incarnation]) -> None:
        """Do nothing: decode workers connect by themselves."""

    def peer_health(self) -> tuple[PeerHealth, ...]:
        return ()

    def consumers(self) -> frozenset[Incarnation]:
        return self._mover.links

    def progress(self) -> int:
        return self._board.transfers

    def expected(self) -> float:
        return math.inf

    def keeps_awake(self) -> str | None:
        """Return why the KV cache's memory cannot be released, or None: decode workers map it from
        their first hand-off on."""
        if not self._mapped:
            return None
        names = " and ".join(self._mapped)
        return f"decode workers may have its KV memory mapped, by {names}: sleep needs tcp or nixl"

    def sleep(self) -> int:
        """Return 0: send slots stay, as transports know their addresses."""
        return 0

    def wake_up(self) -> None:
        """Do nothing."""

    def note_progress(self, engine_step: int, has_work: bool) -> None:
        self._board.note_engine(has_work)

    def ended(self) -> str | None:
        return self._mover.ending or self._channel.problem

    def problem(self) -> str | None:
        return self.ended()

    def _remember(self, key: RequestKey, what: str) -> None:
        self._past[key] = what
        while len(self._past) > MAX_PAST:
            self._past.popitem(last=False)
