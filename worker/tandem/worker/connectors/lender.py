"""Engine's KVConnector over a HandoffProducer: cached blocks, lent to peers on request.

A loan is a hand-off whose prompt was computed before: admitted, announced and final in one turn of
the loop, and given back by ``Released``. A block that is not cached any more, or is beyond the
quota, is declined at once: the peer computes it. Loans delay a request of this engine only by the
blocks that are lent, a share of all, for no longer than the peer's budget.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from tandem.engine.request import Request
from tandem.engine.scheduler.connector import Event, Hold, Lookup, Remote
from tandem.engine.scheduler.lending import CachedPrefixes
from tandem.kvtransfer import events
from tandem.protocol.errors import Refusal
from tandem.protocol.ids import RequestKey
from tandem.protocol.kv import Fence, FirstToken, Released
from tandem.worker.connectors.prefix_fetch import PullMetrics

if TYPE_CHECKING:  # it brings torch
    from tandem.kvtransfer.service.producer import HandoffProducer

logger = logging.getLogger(__name__)

_NOTHING = Remote(Lookup.NOTHING)


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
        """``share`` of the engine's blocks may be lent at once; ``poll``: the producer's events of
        pulls."""
        self._producer = producer
        self._share = share
        self._metrics = metrics
        self._poll = poll
        self._cache: CachedPrefixes | None = None
        self._lent: dict[RequestKey, int] = {}
        """Lent blocks by key, until they are given back."""
        metrics.lent_blocks.set_function(lambda: self.num_lent)

    def lend_from(self, cache: CachedPrefixes) -> None:
        """Set the cache to lend from; called once the engine exists."""
        self._cache = cache

    @property
    def num_lent(self) -> int:
        """Return the number of blocks that are lent now."""
        return sum(list(self._lent.values()))  # a copy: who scrapes asks from another thread

    def admit(self, request: Request) -> Refusal | None:
        """Admit every request."""
        return None

    def lookup(self, request: Request, num_local: int) -> Remote:
        """Return nothing to load."""
        return _NOTHING

    def begin_load(self, request: Request, block_ids: Sequence[int], tokens: range) -> None:
        """Do nothing; never called, as ``lookup`` finds nothing."""
        raise AssertionError("a lender loads nothing")

    def started(self, request: Request) -> None:
        """Do nothing: computed blocks are lent once they are cached."""

    def computed(
        self, request: Request, block_ids: Sequence[int], tokens: range, done: Fence
    ) -> None:
        """Do nothing: computed blocks are lent once they are cached."""

    def first_tokens(
        self, request: Request, first: Sequence[FirstToken], finish: str | None
    ) -> None:
        """Do nothing: tokens are not lent."""

    def finished(self, request: Request, why: str) -> Hold:
        """Do nothing: loans have keys of their own."""
        return Hold.FREE

    def cancelled(self, key: RequestKey) -> None:
        """End a loan: the router that it was for is gone."""
        if key in self._lent:
            self._producer.cancel(key)

    def poll(self) -> list[Event]:
        """Answer the peers' requests; give back blocks that are not read any more."""
        given_back: list[Event] = []
        for event in self._poll():
            if isinstance(event, events.Wanted):
                given_back += self._answer(event)
            elif isinstance(event, Released):
                self._lent.pop(event.key, None)
                given_back.append(event)
            # A loan that ended by itself (``Revoked``) is given back by the ``Released`` behind it.
        return given_back

    def has_pending(self) -> bool:
        """Return whether blocks are lent. Loans require no step: their ends wake the loop."""
        return bool(self._lent)

    def _answer(self, wanted: events.Wanted) -> list[Event]:
        """Lend what there is, or decline; what has to be given back at once."""
        key, cache, producer = wanted.key, self._cache, self._producer
        assert cache is not None, "a peer asks before the engine is there"
        if not key.is_pull:  # it might be a request's
            return self._decline(wanted, "refused")
        if cache.closed():  # a loan would be promised, and hold up the worker's end or its sleep
            return self._decline(wanted, "leaving")
        if producer.is_short or cache.is_short:  # who waits here would, as long as peers ask
            return self._decline(wanted, "quota")
        room = int(self._share * cache.num_blocks) - self.num_lent
        room = min(room, producer.max_blocks - producer.leased_blocks())
        if room <= 0:
            return self._decline(wanted, "quota")
        loan = cache.lend(key, wanted.hashes[:room])
        if loan is None:
            return self._decline(wanted, "evicted")
        count = len(loan.block_ids)
        num_tokens = count * cache.block_size
        refusal = producer.admit(
            key,
            num_tokens=num_tokens,
            num_blocks=count,
            consumer=wanted.consumer,
            budget_ms=wanted.budget_ms,
        )
        if refusal is not None:
            logger.debug("%s is not lent: %s", key, refusal.message)
            self._metrics.declined.labels("refused").inc()
            return [Released(key)]
        self._lent[key] = count
        hashes = wanted.hashes[:count] if producer.wants_hashes else ()
        producer.computed(key, loan.block_ids, num_tokens, loan.fence, hashes)
        producer.final(key, (), None)
        producer.finished(key)
        self._metrics.lent.inc(num_tokens)
        return []

    def _decline(self, wanted: events.Wanted, why: str) -> list[Event]:
        self._producer.refuse(wanted.key)
        self._metrics.declined.labels(why).inc()
        logger.debug("%s is not lent: %s", wanted.key, why)
        return []
