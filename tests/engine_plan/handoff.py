"""A hand-off in the test's own memory: two KVConnectors and the wire between them.

Nothing moves by itself: a test says when the wire delivers, fails, or lets blocks go, so that
every order of events can be written down.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tests.engine_plan.sim import SimExecutor

from tandem.engine.request import Request
from tandem.engine.scheduler.connector import Hold, Lookup, Remote
from tandem.protocol.card import KVKind
from tandem.protocol.errors import FailCause, Refusal, RefusalCode
from tandem.protocol.ids import RequestKey
from tandem.protocol.kv import BlockTables, Fence, FirstToken, Loaded, LoadFailed, Released
from tandem.protocol.kv import Ready as ReadyEvent
from tandem.protocol.requests import Produce

Event = Loaded | LoadFailed | Released | ReadyEvent


@dataclass
class Export:
    num_prompt: int
    upto: int = 0
    tables: BlockTables = ()
    fences: list[Fence] = field(default_factory=list)
    first: tuple[FirstToken, ...] | None = None
    ended: str | None = None
    why: str | None = None


class Connector:
    """What both sides share: events to poll, and the calls that were made."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.calls: list[tuple[str, RequestKey]] = []
        self.pending: set[RequestKey] = set()

    def admit(self, request: Request) -> Refusal | None:
        self.calls.append(("admit", request.key))
        return None

    def lookup(self, request: Request, num_local: int) -> Remote:
        return Remote(Lookup.NOTHING)

    def begin_load(self, request: Request, tables: BlockTables, tokens: range) -> None:
        raise AssertionError("nothing is loaded here")

    def started(self, request: Request) -> None:
        self.calls.append(("started", request.key))

    def computed(self, request: Request, tables: BlockTables, tokens: range, done: Fence) -> None:
        """Nobody listens."""

    def first_tokens(
        self, request: Request, first: Sequence[FirstToken], finish: str | None
    ) -> None:
        """Nobody listens."""

    def finished(self, request: Request, why: str) -> Hold:
        self.calls.append(("finished", request.key))
        return Hold.FREE

    def cancelled(self, key: RequestKey) -> None:
        self.calls.append(("cancelled", key))

    def poll(self) -> list[Event]:
        events, self.events = self.events, []
        return events

    def has_pending(self) -> bool:
        return bool(self.events or self.pending)


class ProducerSide(Connector):
    """Exports what was computed, keeps blocks until the test releases them."""

    def __init__(self, quota: int = 100) -> None:
        super().__init__()
        self.exports: dict[RequestKey, Export] = {}
        self.quota = quota
        self.may_start = True

    def admit(self, request: Request) -> Refusal | None:
        """A producer's prompt is refused beyond the quota."""
        if request.kv is None:
            return super().admit(request)
        if len(self.exports) >= self.quota:
            return Refusal(code=RefusalCode.CAPACITY, message="too many leases")
        self.exports[request.key] = Export(request.num_prefill)
        return super().admit(request)

    def lookup(self, request: Request, num_local: int) -> Remote:
        """A producer may have to wait for the quota."""
        wait = request.kv is not None and not self.may_start
        return Remote(Lookup.LATER if wait else Lookup.NOTHING)

    def computed(self, request: Request, tables: BlockTables, tokens: range, done: Fence) -> None:
        """Chunks come in order, from the first token on, without gaps."""
        export = self.exports.get(request.key)
        if export is None:
            return
        assert tokens.start == export.upto, "a gap or a repeat"
        for before, now in zip(export.tables, tables, strict=False):
            kept = all(a == b or b < 0 for a, b in zip(before, now, strict=False) if a >= 0)
            assert kept, "blocks moved"
        assert export.first is None
        export.upto, export.tables = tokens.stop, tables
        export.fences.append(done)

    def first_tokens(
        self, request: Request, first: Sequence[FirstToken], finish: str | None
    ) -> None:
        """All of the prompt is there by now."""
        export = self.exports[request.key]
        assert export.upto == export.num_prompt
        export.first, export.ended = tuple(first), finish

    def finished(self, request: Request, why: str) -> Hold:
        hold = super().finished(request, why)
        export = self.exports.get(request.key)
        if export is None:
            return hold
        export.why = why
        self.pending.add(request.key)
        return Hold.KEPT

    def cancelled(self, key: RequestKey) -> None:
        super().cancelled(key)
        if key in self.pending:
            self.release(key)

    def release(self, key: RequestKey) -> None:
        del self.exports[key]
        self.pending.discard(key)
        self.events.append(Released(key))


class Ready(dict[RequestKey, int]):
    """Keys whose KV comes, to the tokens that come; each is announced as it is put in."""

    def __init__(self, events: Callable[[], list[Event]]) -> None:
        super().__init__()
        self._events = events

    def __setitem__(self, key: RequestKey, num_tokens: int) -> None:
        super().__setitem__(key, num_tokens)
        self._events().append(ReadyEvent(key, num_tokens))


class ConsumerSide(Connector):
    """Loads what the producer exported when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.ready = Ready(lambda: self.events)
        self.num_looks = 0
        """Calls of ``lookup``."""
        self.loads: dict[RequestKey, tuple[BlockTables, range]] = {}
        self.local: dict[RequestKey, int] = {}
        self.loading: set[RequestKey] = set()
        self.keep_on_abort = True

    def lookup(self, request: Request, num_local: int) -> Remote:
        self.num_looks += 1
        if request.kv is None:
            return Remote(Lookup.NOTHING)
        self.local[request.key] = num_local
        count = self.ready.get(request.key)
        if count is None:
            return Remote(Lookup.LATER, announced=True)
        return Remote(Lookup.READY, count)

    def begin_load(self, request: Request, tables: BlockTables, tokens: range) -> None:
        assert request.key not in self.loads
        self.loads[request.key] = tables, tokens
        self.loading.add(request.key)

    def finished(self, request: Request, why: str) -> Hold:
        """Blocks that are still being written are kept."""
        hold = super().finished(request, why)
        if request.key in self.loading and self.keep_on_abort:
            self.pending.add(request.key)
            return Hold.KEPT
        return hold

    def release(self, key: RequestKey) -> None:
        self.loading.discard(key)
        self.pending.discard(key)
        self.events.append(Released(key))

    def fail(self, key: RequestKey, *, blocks_free: bool = True) -> None:
        if blocks_free:
            self.loading.discard(key)
        self.events.append(LoadFailed(key, FailCause.PEER, "the peer is gone", blocks_free))

    def deliver(
        self,
        key: RequestKey,
        first: Sequence[FirstToken],
        *,
        source: SimExecutor,
        blocks: BlockTables,
        target: SimExecutor,
    ) -> None:
        tables, tokens = self.loads[key]
        for group, theirs, mine in zip(target.groups, blocks, tables, strict=True):
            slots = target.visible(group, tokens.stop)
            if group.kind is not KVKind.STATE:
                border = slots.start // group.block_size * group.block_size
                slots = range(max(border, tokens.start), slots.stop)
            target.fill(mine, slots, source.read(theirs, slots))
        self.loading.discard(key)
        self.events.append(Loaded(key, tuple(first)))


class BothSides:
    """A connector of a worker that produces and consumes."""

    def __init__(self) -> None:
        self.producer, self.consumer = ProducerSide(), ConsumerSide()

    def _side(self, request: Request) -> ProducerSide | ConsumerSide:
        return self.producer if isinstance(request.kv, Produce) else self.consumer

    def admit(self, request: Request) -> Refusal | None:
        return self._side(request).admit(request)

    def lookup(self, request: Request, num_local: int) -> Remote:
        return self._side(request).lookup(request, num_local)

    def begin_load(self, request: Request, tables: BlockTables, tokens: range) -> None:
        self._side(request).begin_load(request, tables, tokens)

    def started(self, request: Request) -> None:
        self._side(request).started(request)

    def computed(self, request: Request, tables: BlockTables, tokens: range, done: Fence) -> None:
        self._side(request).computed(request, tables, tokens, done)

    def first_tokens(
        self, request: Request, first: Sequence[FirstToken], finish: str | None
    ) -> None:
        self._side(request).first_tokens(request, first, finish)

    def finished(self, request: Request, why: str) -> Hold:
        return self._side(request).finished(request, why)

    def cancelled(self, key: RequestKey) -> None:
        self.producer.cancelled(key)
        self.consumer.cancelled(key)

    def poll(self) -> list[Event]:
        return [*self.producer.poll(), *self.consumer.poll()]

    def has_pending(self) -> bool:
        return self.producer.has_pending() or self.consumer.has_pending()
