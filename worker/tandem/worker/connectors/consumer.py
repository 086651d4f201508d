"""Engine's KVConnector over a HandoffConsumer: loads KV that a prefill worker computed.

Never blocks the step loop. The router gets each failure and alone starts another attempt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tandem.engine.request import Request
from tandem.engine.scheduler.connector import Event, Hold, Lookup, Remote
from tandem.kvtransfer import events
from tandem.protocol.errors import Refusal, RefusalCode
from tandem.protocol.hashing import hash_blocks, root_hash
from tandem.protocol.ids import BlockHash, RequestKey
from tandem.protocol.kv import BlockTables, Fence, FirstToken, Ready, Released
from tandem.protocol.requests import Consume

if TYPE_CHECKING:  # imports torch, which simulations lack
    from tandem.kvtransfer.service.consumer import HandoffConsumer

_NOTHING = Remote(Lookup.NOTHING)
_LATER = Remote(Lookup.LATER, announced=True)


@dataclass(slots=True)
class _Pull:
    ready: Remote = _LATER
    loading: bool = False
    let_go: bool = False
    """Whether the engine ended the request and left its blocks here."""


class DecodeConnector:
    """KVConnector of a decode worker, one per engine; requests without ``Consume`` are ignored."""

    def __init__(
        self,
        consumer: HandoffConsumer,
        *,
        poll: Callable[[], Iterable[events.ConsumerEvent]] | None = None,
    ) -> None:
        """``poll`` replaces the consumer's own if other connectors share its events."""
        self._consumer = consumer
        self._poll = poll or consumer.poll
        self._pulls: dict[RequestKey, _Pull] = {}

    def admit(self, request: Request) -> Refusal | None:
        kv = request.kv
        if not isinstance(kv, Consume):
            return None
        if not self._consumer.peer_up(kv.producer):
            return Refusal(
                code=RefusalCode.PEER_UNKNOWN,
                message=f"no live link to prefill worker {kv.producer.hex()[:8]}",
            )
        self._pulls[request.key] = _Pull()
        self._consumer.open(request.key, kv.producer, budget_ms=request.source.budget_ms)
        return None

    def lookup(self, request: Request, num_local: int) -> Remote:
        pull = self._pulls.get(request.key)
        return _NOTHING if pull is None or pull.loading else pull.ready

    def begin_load(self, request: Request, tables: BlockTables, tokens: range) -> None:
        pull = self._pulls.get(request.key)
        if pull is not None:
            pull.loading = True
            hashes = self._hashes(request, tokens.stop) if self._consumer.wants_hashes else ()
            self._consumer.begin_load(request.key, tables, tokens.start, tokens.stop, hashes)

    def _hashes(self, request: Request, num_tokens: int) -> Sequence[BlockHash]:
        peers = self._consumer.hashed_as(request.key)
        size, source = peers.layout.block_size, request.source
        if size == request.group.block_size:
            return request.hashes_upto(num_tokens // size)
        root = root_hash(
            fingerprint=peers.digest,
            block_size=size,
            adapter=source.adapter,
            salt=source.cache_salt,
        )
        return hash_blocks(root, request.token_ids[:num_tokens], size, source.prompt_embeds)

    def started(self, request: Request) -> None:
        """Do nothing: a decode worker exports no KV."""

    def computed(self, request: Request, tables: BlockTables, tokens: range, done: Fence) -> None:
        """Do nothing: a decode worker exports no KV."""

    def first_tokens(
        self, request: Request, first: Sequence[FirstToken], finish: str | None
    ) -> None:
        """Do nothing: a decode worker exports no KV."""

    def finished(self, request: Request, why: str) -> Hold:
        pull = self._pulls.get(request.key)
        if pull is None:
            return Hold.FREE
        self._consumer.cancel(request.key)
        if not pull.loading:
            del self._pulls[request.key]
            return Hold.FREE
        pull.let_go = True
        return Hold.KEPT

    def cancelled(self, key: RequestKey) -> None:
        """Do nothing: ``finished`` has stopped the pull already."""

    def poll(self) -> list[Event]:
        return [found for event in self._poll() for found in self._events_of(event)]

    def has_pending(self) -> bool:
        return bool(self._pulls)

    def _events_of(self, event: events.ConsumerEvent) -> Iterator[Event]:
        if isinstance(event, Ready):
            if event.key in self._pulls:
                self._pulls[event.key].ready = Remote(Lookup.READY, event.num_tokens)
                yield event
            return
        if isinstance(event, Released):
            yield event
            return
        pull = self._pulls.pop(event.key, None)
        if pull is not None and pull.let_go:
            if event.blocks_free:
                yield Released(event.key)
        elif not isinstance(event, events.Cancelled):
            yield event
