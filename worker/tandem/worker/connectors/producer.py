"""Engine's KVConnector over a HandoffProducer: exports the KV that a prefill worker computes.

Never blocks the step loop. The engine keeps an export's blocks until ``Released``, even if the
request has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from tandem.engine.request import Request
from tandem.engine.scheduler.connector import Event, Hold, Lookup, Remote
from tandem.engine.scheduler.request_table import ABORT, FAILED
from tandem.kvtransfer import events
from tandem.protocol.errors import Refusal
from tandem.protocol.ids import RequestKey
from tandem.protocol.kv import BlockTables, Fence, FirstToken, Released
from tandem.protocol.requests import Produce

if TYPE_CHECKING:  # imports torch, which simulations lack
    from tandem.kvtransfer.service.producer import HandoffProducer

_NOTHING = Remote(Lookup.NOTHING)
_LATER = Remote(Lookup.LATER)


class PrefillConnector:
    """KVConnector of a prefill worker, one per engine; requests without ``Produce`` are ignored."""

    def __init__(
        self,
        producer: HandoffProducer,
        block_size: int,
        *,
        poll: Callable[[], Iterable[events.ProducerEvent]] | None = None,
    ) -> None:
        """``poll`` replaces the producer's own if other connectors share its events."""
        self._producer = producer
        self._poll = poll or producer.poll
        self._block_size = block_size
        self._exports: set[RequestKey] = set()

    def admit(self, request: Request) -> Refusal | None:
        kv = request.kv
        if not isinstance(kv, Produce):
            return None
        refusal = self._producer.admit(
            request.key,
            num_tokens=request.num_prefill,
            consumer=kv.consumer,
            budget_ms=request.source.budget_ms,
        )
        if refusal is None:
            self._exports.add(request.key)
        return refusal

    def lookup(self, request: Request, num_local: int) -> Remote:
        """Return nothing to load, once the lease quota has room for the blocks."""
        waits = request.key in self._exports and not self._producer.may_start(request.key)
        return _LATER if waits else _NOTHING

    def begin_load(self, request: Request, tables: BlockTables, tokens: range) -> None:
        raise AssertionError("a prefill worker loads nothing")

    def started(self, request: Request) -> None:
        """Let the consumer reserve its blocks while the prompt is computed."""
        if request.key in self._exports:
            self._producer.started(request.key)

    def computed(self, request: Request, tables: BlockTables, tokens: range, done: Fence) -> None:
        if request.key in self._exports:
            wants = self._producer.wants_hashes
            hashes = request.hashes_upto(tokens.stop // self._block_size) if wants else ()
            self._producer.computed(request.key, tables, tokens.stop, done, hashes)

    def first_tokens(
        self, request: Request, first: Sequence[FirstToken], finish: str | None
    ) -> None:
        if request.key in self._exports:
            self._producer.final(request.key, first, finish)

    def finished(self, request: Request, why: str) -> Hold:
        """Leave the blocks to the service until no peer reads them."""
        if request.key not in self._exports:
            return Hold.FREE
        if why in (ABORT, FAILED):
            self._producer.cancel(request.key)
        self._producer.finished(request.key)
        return Hold.KEPT

    def cancelled(self, key: RequestKey) -> None:
        """End the key's lease, or remember the key if it is unknown."""
        self._producer.cancel(key)

    def poll(self) -> list[Event]:
        found: list[Event] = []
        for event in self._poll():
            if isinstance(event, events.Wanted):  # not a pull's key: it gets no loan
                self._producer.refuse(event.key)
                continue
            if isinstance(event, Released):
                self._exports.discard(event.key)
            found.append(event)
        return found

    def has_pending(self) -> bool:
        """Return whether exports are open. They require no step: their ends wake the loop."""
        return bool(self._exports)
