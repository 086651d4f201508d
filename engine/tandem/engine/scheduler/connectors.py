"""Several connectors of one scheduler, asked in order, with the interface of one."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.engine.request import Request
from tandem.engine.scheduler.connector import (
    Event,
    Hold,
    KVConnector,
    Lookup,
    Remote,
)
from tandem.engine.scheduler.request_table import ABORT
from tandem.protocol.errors import Refusal
from tandem.protocol.ids import RequestKey
from tandem.protocol.kv import BlockTables, Fence, FirstToken, Released

_NOTHING = Remote(Lookup.NOTHING)


def compose(connectors: Sequence[KVConnector]) -> KVConnector | None:
    """Return one connector for all, in this order; None if there are none."""
    if len(connectors) < 2:
        return connectors[0] if connectors else None
    return Connectors(connectors)


class Connectors:
    """ComposedConnector that delegates to two or more connectors."""

    def __init__(self, connectors: Sequence[KVConnector]) -> None:
        self._all = tuple(connectors)
        self._chosen: dict[RequestKey, KVConnector] = {}
        """Connector that last reported KV for a request."""
        self._holds: dict[RequestKey, int] = {}
        """Number of connectors that keep the blocks of an ended request."""

    def admit(self, request: Request) -> Refusal | None:
        """Return the first refusal; call ``finished`` of connectors asked before it."""
        for index, each in enumerate(self._all):
            refusal = each.admit(request)
            if refusal is not None:
                for earlier in self._all[:index]:
                    earlier.finished(request, ABORT)
                return refusal
        return None

    def lookup(self, request: Request, num_local: int) -> Remote:
        for each in self._all:
            remote = each.lookup(request, num_local)
            if remote.lookup is not Lookup.NOTHING:
                self._chosen[request.key] = each
                return remote
        return _NOTHING

    def lookup_again(self, request: Request, num_local: int) -> Remote:
        chosen = self._chosen.get(request.key)
        if chosen is None:
            return self.lookup(request, num_local)
        if isinstance(chosen, Connectors):
            return chosen.lookup_again(request, num_local)
        return chosen.lookup(request, num_local)

    def begin_load(self, request: Request, tables: BlockTables, tokens: range) -> None:
        self._chosen[request.key].begin_load(request, tables, tokens)

    def started(self, request: Request) -> None:
        for each in self._all:
            each.started(request)

    def computed(self, request: Request, tables: BlockTables, tokens: range, done: Fence) -> None:
        for each in self._all:
            each.computed(request, tables, tokens, done)

    def first_tokens(
        self, request: Request, first: Sequence[FirstToken], finish: str | None
    ) -> None:
        for each in self._all:
            each.first_tokens(request, first, finish)

    def finished(self, request: Request, why: str) -> Hold:
        """Return KEPT if any connector keeps the blocks, until the last of these releases them."""
        self._chosen.pop(request.key, None)
        holds = sum(each.finished(request, why) is Hold.KEPT for each in self._all)
        if not holds:
            return Hold.FREE
        self._holds[request.key] = holds
        return Hold.KEPT

    def cancelled(self, key: RequestKey) -> None:
        for each in self._all:
            each.cancelled(key)

    def poll(self) -> Sequence[Event]:
        """Return all events; of several ``Released`` for one request, only the last."""
        return [event for each in self._all for event in each.poll() if self._counts(event)]

    def has_pending(self) -> bool:
        return any(each.has_pending() for each in self._all)

    def _counts(self, event: Event) -> bool:
        if not isinstance(event, Released):
            return True
        left = self._holds.pop(event.key, 1) - 1
        if left:
            self._holds[event.key] = left
        return not left
