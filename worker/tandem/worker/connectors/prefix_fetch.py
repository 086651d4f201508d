"""Engine's KVConnector over a HandoffConsumer for prompt starts that a peer has cached.

The request names the peer (``Pull``); it is asked when the request is scheduled, so that leases are
short. What a pull does not deliver in time is computed here; it never fails a request.
"""

from __future__ import annotations

import logging
import time
from collections.abc import (
    Callable,
    Iterable,
    Iterator,
    Sequence,
)
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
)

from tandem.engine.request import Request
from tandem.engine.scheduler.connector import (
    Event,
    Hold,
    LoadMissed,
    Lookup,
    Remote,
)
from tandem.engine.scheduler.lending import CachedPrefixes
from tandem.kvtransfer import events
from tandem.kvtransfer.handoff.messages import MAX_PULLED_BLOCKS
from tandem.protocol.errors import FailCause, Refusal
from tandem.protocol.ids import BlockHash, Incarnation, RequestKey
from tandem.protocol.kv import (
    BlockTables,
    Fence,
    FirstToken,
    Loaded,
    LoadFailed,
    Released,
)

if TYPE_CHECKING:
    from tandem.kvtransfer.service.consumer import HandoffConsumer
    from tandem.kvtransfer.service.producer import HandoffProducer

SECONDS_BUCKETS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05),
    *(0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0),
)


class Fallback(StrEnum):
    """Reasons to compute a prefix here that a peer has, besides causes of failures."""

    CACHED = "cached"
    """The local cache has what the router knew of the peer's."""
    TIER = "tier"
    """This worker's tier in host memory has the start of the prefix."""
    NO_LINK = "no_link"
    LESS = "less"
    """The peer has no more of the prefix than this worker."""


class PullMetrics:
    """Metrics of pulls; counted by the engine's thread."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.pulls = Counter(
            "tandem:kv_prefix_pulls",
            "Prompts whose cached prefix was pulled from a peer.",
            registry=registry,
        )
        self.tokens = Counter(
            "tandem:kv_prefix_pulled_tokens",
            "Prompt tokens whose KV came from a peer's cache.",
            registry=registry,
        )
        self.seconds = Histogram(
            "tandem:kv_prefix_pull_seconds",
            "Time of a prefix pull.",
            registry=registry,
            buckets=SECONDS_BUCKETS,
        )
        self.fallbacks = Counter(
            "tandem:kv_prefix_pull_fallbacks",
            "Prefixes computed instead of pulled, by reason.",
            ["reason"],
            registry=registry,
        )
        self.lent = Counter(
            "tandem:kv_prefix_lent_tokens",
            "Tokens of cached prefixes that were lent to peers.",
            registry=registry,
        )
        self.declined = Counter(
            "tandem:kv_prefix_loans_declined",
            "Declined requests of peers for a cached prefix, by reason.",
            ["reason"],
            registry=registry,
        )
        self.open = Gauge(
            "tandem:kv_prefix_pulls_open",
            "Requests with a prefix pull in progress.",
            registry=registry,
        )
        self.lent_blocks = Gauge(
            "tandem:kv_prefix_lent_blocks", "Blocks lent to peers now.", registry=registry
        )
        for reason in (*Fallback, *FailCause):
            self.fallbacks.labels(str(reason))
        for declined in ("evicted", "leaving", "quota", "refused"):
            self.declined.labels(declined)


logger = logging.getLogger(__name__)

_NOTHING = Remote(Lookup.NOTHING)
_LATER = Remote(Lookup.LATER, lent=True)


@dataclass(slots=True)
class _Pull:
    """Pull of one request, kept until the engine has freed the request and no write is pending."""

    key: RequestKey
    holder: Incarnation
    asked: int
    """Tokens requested from the peer; 0 if no request was sent."""
    since: float
    ready: int | None = None
    tokens: range | None = None
    """Tokens that are loaded; None before ``begin_load``."""
    over: bool = False
    """Whether the load has ended: missing tokens are computed."""
    settled: bool = False
    """Whether the engine has its result."""
    let_go: bool = False
    """Whether the engine ended the request and left its blocks here."""


class PullConnector:
    """KVConnector of pulls, one per engine; requests without ``pull`` are ignored."""

    def __init__(
        self,
        consumer: HandoffConsumer,
        block_size: int,
        metrics: PullMetrics,
        *,
        poll: Callable[[], Iterable[events.ConsumerEvent]],
        has_tier: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``poll`` returns the pulls' events. ``has_tier``: blocks missing from the cache may be in
        host memory. ``clock`` is monotonic, in seconds."""
        self._consumer = consumer
        self._block_size = block_size
        self._metrics = metrics
        self._poll = poll
        self._has_tier = has_tier
        self._clock = clock
        self._pulls: dict[RequestKey, _Pull] = {}
        """By ``RequestKey.for_pull``."""
        metrics.open.set_function(lambda: len(self._pulls))
        self._missed: list[LoadMissed | Released] = []

    def admit(self, request: Request) -> Refusal | None:
        return None

    def lookup(self, request: Request, num_local: int) -> Remote:
        """Return the peer's answer so far; the first call sends the request to the peer."""
        pull = self._pulls.get(request.key.for_pull)
        if pull is None:
            return self._ask(request, num_local)
        if pull.over or pull.settled or pull.tokens is not None:
            return _NOTHING
        if pull.ready is None:
            return _LATER
        if pull.ready <= num_local:
            self._give_up(pull, Fallback.LESS)
            return _NOTHING
        return Remote(Lookup.READY, pull.ready)

    def begin_load(self, request: Request, tables: BlockTables, tokens: range) -> None:
        pull = self._pulls[request.key.for_pull]
        pull.tokens = tokens
        if pull.over:
            self._missed.append(self._answer_missed(pull))
            return
        wants = self._consumer.wants_hashes
        hashes = request.hashes_upto(tokens.stop // self._block_size) if wants else ()
        self._consumer.begin_load(pull.key.for_pull, tables, tokens.start, tokens.stop, hashes)

    def started(self, request: Request) -> None:
        """Do nothing: a pull exports no KV."""

    def computed(self, request: Request, tables: BlockTables, tokens: range, done: Fence) -> None:
        """Do nothing: a pull exports no KV."""

    def first_tokens(
        self, request: Request, first: Sequence[FirstToken], finish: str | None
    ) -> None:
        """Do nothing: a pull exports no KV."""

    def finished(self, request: Request, why: str) -> Hold:
        pull = self._pulls.get(request.key.for_pull)
        if pull is None:
            return Hold.FREE
        writing = pull.tokens is not None and not pull.settled
        if not (pull.over or pull.settled):
            self._consumer.cancel(pull.key.for_pull)
        if writing:
            pull.let_go = True
            return Hold.KEPT
        del self._pulls[pull.key.for_pull]
        return Hold.FREE

    def cancelled(self, key: RequestKey) -> None:
        """Do nothing: ``finished`` has stopped the pull already."""

    def poll(self) -> list[Event]:
        missed, self._missed = self._missed, []
        return [*missed, *(found for event in self._poll() for found in self._events_of(event))]

    def has_pending(self) -> bool:
        return any(not (each.over or each.settled) for each in self._pulls.values())

    def _ask(self, request: Request, num_local: int) -> Remote:
        wanted = request.source.pull
        if wanted is None or len(request.group.live) != 1:
            return _NOTHING
        wished = min(wanted.num_tokens, request.max_cached_tokens) // self._block_size
        most = min(wished, MAX_PULLED_BLOCKS)
        pull = _Pull(request.key, wanted.holder, most * self._block_size, self._clock())
        self._pulls[request.key.for_pull] = pull
        if pull.asked <= num_local:
            self._fall_back(pull, Fallback.CACHED)
        elif self._has_tier and num_local + self._block_size <= wanted.have:
            self._fall_back(pull, Fallback.TIER)
        elif not self._consumer.peer_up(wanted.holder):
            self._fall_back(pull, Fallback.NO_LINK)
        else:
            hashes: Sequence[BlockHash] = request.hashes_upto(most)
            budget = max(1, wanted.budget_ms)
            self._consumer.open(
                request.key.for_pull, wanted.holder, budget_ms=budget, hashes=hashes
            )
            return _LATER
        return _NOTHING

    def _events_of(self, event: events.ConsumerEvent) -> Iterator[Event]:
        pull = self._pulls.get(event.key)
        if pull is None:
            return
        if isinstance(event, events.Ready):
            if event.num_tokens > pull.asked:
                self._give_up(pull, FailCause.IDENTITY)
            else:
                pull.ready = event.num_tokens
        elif isinstance(event, Released):
            yield self._answer_missed(pull)
        elif isinstance(event, Loaded) and event.usable:
            yield self._answer_loaded(pull, event)
        else:
            yield from self._ended(pull, event)

    def _ended(self, pull: _Pull, event: LoadFailed | Loaded | events.Cancelled) -> Iterator[Event]:
        if not (pull.over or pull.let_go):
            cause = event.cause if isinstance(event, LoadFailed) else FailCause.IDENTITY
            message = event.message if isinstance(event, LoadFailed) else ""
            self._fall_back(pull, cause, message)
        if pull.tokens is not None and event.blocks_free and not pull.settled:
            yield self._answer_missed(pull)

    def _answer_loaded(self, pull: _Pull, event: Loaded) -> Event:
        assert pull.tokens is not None, "loaded without blocks"
        pull.settled = True
        if pull.let_go:
            return self._released(pull)
        seconds, count = self._clock() - pull.since, len(pull.tokens)
        self._metrics.pulls.inc()
        self._metrics.tokens.inc(count)
        self._metrics.seconds.observe(seconds)
        logger.debug(
            "%s: %d tokens pulled from %s in %.1f ms",
            *(pull.key, count, pull.holder.hex()[:8], seconds * 1e3),
        )
        return Loaded(pull.key, (), notes=event.notes)

    def _answer_missed(self, pull: _Pull) -> LoadMissed | Released:
        pull.settled = pull.over = True
        return self._released(pull) if pull.let_go else LoadMissed(pull.key)

    def _released(self, pull: _Pull) -> Released:
        del self._pulls[pull.key.for_pull]
        return Released(pull.key)

    def _give_up(self, pull: _Pull, why: Fallback | FailCause) -> None:
        self._consumer.cancel(pull.key.for_pull)
        self._fall_back(pull, why)

    def _fall_back(self, pull: _Pull, why: Fallback | FailCause, message: str = "") -> None:
        pull.over = True
        self._metrics.fallbacks.labels(str(why)).inc()
        logger.info(
            "%s: its first %d tokens are not pulled from %s but computed: %s",
            *(pull.key, pull.asked, pull.holder.hex()[:8], message or str(why)),
        )


class LendConnector:
    """KVConnector of loans, one per engine; the engine's own requests do not use it."""

    def __init__(
        self,
        producer: HandoffProducer,
        share: float,
        metrics: PullMetrics,
        *,
        poll: Callable[[], Iterable[events.ProducerEvent]],
    ) -> None:
        """``share`` is the part of the engine's blocks that may be lent at once; ``poll`` returns
        the pulls' events."""
        self._producer = producer
        self._share = share
        self._metrics = metrics
        self._poll = poll
        self._cache: CachedPrefixes | None = None
        self._lent: dict[RequestKey, int] = {}
        metrics.lent_blocks.set_function(lambda: self.num_lent)

    def lend_from(self, cache: CachedPrefixes) -> None:
        self._cache = cache

    @property
    def num_lent(self) -> int:
        return sum(list(self._lent.values()))  # a copy: metrics are read in another thread

    def admit(self, request: Request) -> Refusal | None:
        return None

    def lookup(self, request: Request, num_local: int) -> Remote:
        return _NOTHING

    def begin_load(self, request: Request, tables: BlockTables, tokens: range) -> None:
        raise AssertionError("a lender loads nothing")

    def started(self, request: Request) -> None:
        """Do nothing: computed blocks are lent once they are cached."""

    def computed(self, request: Request, tables: BlockTables, tokens: range, done: Fence) -> None:
        """Do nothing: computed blocks are lent once they are cached."""

    def first_tokens(
        self, request: Request, first: Sequence[FirstToken], finish: str | None
    ) -> None:
        """Do nothing: tokens are not lent."""

    def finished(self, request: Request, why: str) -> Hold:
        return Hold.FREE

    def cancelled(self, key: RequestKey) -> None:
        """End the loan of a router that is gone."""
        if key in self._lent:
            self._producer.cancel(key)

    def poll(self) -> list[Event]:
        given_back: list[Event] = []
        for event in self._poll():
            if isinstance(event, events.Wanted):
                given_back += self._answer(event)
            elif isinstance(event, Released):
                self._lent.pop(event.key, None)
                given_back.append(event)
            # ``Released`` follows ``LoadFailed`` and gives back the blocks of a loan that ended by
            # itself.
        return given_back

    def has_pending(self) -> bool:
        """Return whether blocks are lent. Loans require no step: their ends wake the loop."""
        return bool(self._lent)

    def _answer(self, wanted: events.Wanted) -> list[Event]:
        key, cache, producer = wanted.key, self._cache, self._producer
        assert cache is not None, "a peer asks before the engine is there"
        if not key.is_pull:  # it might be a request's
            return self._decline(wanted, "refused")
        if cache.closed():  # a loan would delay the worker's end or sleep
            return self._decline(wanted, "leaving")
        if producer.is_short or cache.is_short:  # local requests that wait go first
            return self._decline(wanted, "quota")
        room = int(self._share * cache.num_blocks) - self.num_lent
        room = min(room, producer.max_blocks - producer.leased_blocks())
        spans = producer.tokens_in(room) // cache.block_size
        if not spans:
            return self._decline(wanted, "quota")
        loan = cache.lend(key, wanted.hashes[:spans])
        if loan is None:
            return self._decline(wanted, "evicted")
        refusal = producer.admit(
            key,
            num_tokens=loan.num_tokens,
            consumer=wanted.consumer,
            budget_ms=wanted.budget_ms,
        )
        if refusal is not None:
            logger.debug("%s is not lent: %s", key, refusal.message)
            self._metrics.declined.labels("refused").inc()
            return [Released(key)]
        self._lent[key] = sum(block >= 0 for table in loan.tables for block in table)
        known = loan.num_tokens // cache.block_size
        hashes = wanted.hashes[:known] if producer.wants_hashes else ()
        producer.computed(key, loan.tables, loan.num_tokens, loan.fence, hashes)
        producer.final(key, (), None)
        producer.finished(key)
        self._metrics.lent.inc(loan.num_tokens)
        return []

    def _decline(self, wanted: events.Wanted, why: str) -> list[Event]:
        self._producer.refuse(wanted.key)
        self._metrics.declined.labels(why).inc()
        logger.debug("%s is not lent: %s", wanted.key, why)
        return []
