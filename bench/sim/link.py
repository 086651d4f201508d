"""The hand-off between two simulated workers: what kvtransfer's services say, and when.

``Producing`` and ``Consuming`` have the faces of ``HandoffProducer`` and ``HandoffConsumer`` that
the roles' connectors call. A ``Link`` copies what P has computed into D's blocks, one chunk after
the other; KV is usable when the last one has come and P has said token 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.sim.clock import Clock, Event
from bench.sim.times import Way

from tandem.kvtransfer.events import (
    ConsumerEvent,
    Loaded,
    ProducerEvent,
    Ready,
    Released,
)
from tandem.protocol.card import blocks_for
from tandem.protocol.errors import Refusal
from tandem.protocol.ids import Incarnation, RequestKey
from tandem.protocol.kv import BlockTables, Fence, FirstToken


class Side:
    """One worker's end of its hand-offs: what it is told, and its own time."""

    def __init__(self) -> None:
        self.now = 0.0
        """The worker's time."""
        self.notify: Event = lambda: None
        """Has the worker look."""


@dataclass(slots=True)
class _Transfer:
    num_tokens: int
    computed: int = 0
    copied: int = 0
    """Copies of so many tokens are under way or done."""
    landed: int = 0
    loading: bool = False
    first: tuple[FirstToken, ...] | None = None
    finish: str | None = None
    finished: bool = False
    done: bool = False


class Link:
    """P's memory to D's, one copy at a time; both workers' transfer threads."""

    def __init__(self, clock: Clock, way: Way, block_bytes: int, block_size: int) -> None:
        self._clock, self._way = clock, way
        self._block_bytes, self._block_size = block_bytes, block_size
        self.producing: Producing
        self.consuming: Consuming
        self._transfers: dict[RequestKey, _Transfer] = {}
        self._free_at = 0.0
        self.moved_bytes = 0
        self.busy = 0.0
        """Seconds of all copies."""

    @property
    def waiting_bytes(self) -> int:
        """Computed and not copied."""
        tokens = sum(each.computed - each.landed for each in self._transfers.values())
        return tokens * self._block_bytes // self._block_size

    def open(self, key: RequestKey, num_tokens: int) -> None:
        """P has taken the request."""
        self._transfers[key] = _Transfer(num_tokens)

    def started(self, key: RequestKey, now: float) -> None:
        """P begins: D may reserve."""
        transfer = self._transfers[key]
        ready = Ready(key, transfer.num_tokens)
        self._tell(now + self._way.wake, self.consuming, ready)

    def computed(self, key: RequestKey, tokens: int, now: float) -> None:
        """P has so many tokens of the prompt."""

        def known() -> None:
            self._transfers[key].computed = tokens
            self._copy(key)

        self._clock.at(now, known)

    def load(self, key: RequestKey, start: int, now: float) -> None:
        """D has blocks for what lies behind ``start``."""

        def begun() -> None:
            transfer = self._transfers[key]
            transfer.loading = True
            transfer.copied = transfer.landed = start
            self._copy(key)
            self._end(key)

        self._clock.at(now, begun)

    def final(
        self, key: RequestKey, first: Sequence[FirstToken], finish: str | None, now: float
    ) -> None:
        """P has drawn token 1."""

        def told() -> None:
            transfer = self._transfers[key]
            transfer.first, transfer.finish = tuple(first), finish
            self._end(key)

        self._clock.at(now + self._way.wake, told)

    def finished(self, key: RequestKey, now: float) -> None:
        """P's engine has let go of it."""

        def ended() -> None:
            self._transfers[key].finished = True
            self._release(key)

        self._clock.at(now, ended)

    def _copy(self, key: RequestKey) -> None:
        transfer = self._transfers.get(key)
        if transfer is None or not transfer.loading or transfer.copied >= transfer.computed:
            return
        upto = transfer.computed
        blocks = blocks_for(upto - transfer.copied, self._block_size)
        transfer.copied = upto
        seconds = blocks * (self._block_bytes / self._way.copy + self._way.block)
        self._free_at = max(self._free_at, self._clock.now) + seconds
        self.busy += seconds
        self.moved_bytes += blocks * self._block_bytes

        def landed() -> None:
            transfer.landed = upto
            self._end(key)

        self._clock.at(self._free_at + self._way.copies, landed)

    def _end(self, key: RequestKey) -> None:
        """Tell D when the last of its KV and token 1 are there."""
        transfer = self._transfers.get(key)
        if transfer is None or transfer.done or transfer.first is None or not transfer.loading:
            return
        if transfer.finish is not None:
            told: ConsumerEvent = Loaded(key, transfer.first, usable=False)
        elif transfer.landed >= transfer.num_tokens:
            told = Loaded(key, transfer.first)
        else:
            return
        transfer.done = True
        self._tell(self._clock.now + self._way.join, self.consuming, told)
        self._release(key)

    def _release(self, key: RequestKey) -> None:
        transfer = self._transfers.get(key)
        if transfer is not None and transfer.done and transfer.finished:
            del self._transfers[key]
            self._tell(self._clock.now + self._way.wake, self.producing, Released(key))

    def _tell(
        self, when: float, side: Producing | Consuming, event: ConsumerEvent | ProducerEvent
    ) -> None:
        def told() -> None:
            side.events.append(event)
            side.worker.notify()

        self._clock.at(when, told)


class _End:
    """One worker's hand-offs, over a link to each worker of the other role."""

    wants_hashes = False

    def __init__(self, worker: Side) -> None:
        self.worker = worker
        self.events: list[ConsumerEvent | ProducerEvent] = []
        self.links: dict[Incarnation, Link] = {}
        self._keys: dict[RequestKey, Link] = {}

    def cancel(self, key: RequestKey) -> None:
        """Nobody cancels a simulated request before its end."""

    def poll(self) -> list[ConsumerEvent | ProducerEvent]:
        """Return the events since the last call."""
        told, self.events = self.events, []
        return told


class Producing(_End):
    """A prefill worker's hand-offs."""

    def admit(
        self,
        key: RequestKey,
        *,
        num_tokens: int,
        consumer: Incarnation,
        budget_ms: int | None,
    ) -> Refusal | None:
        """Every request: quotas bound what no simulation has."""
        self._keys[key] = self.links[consumer]
        self._keys[key].open(key, num_tokens)
        return None

    def may_start(self, key: RequestKey) -> bool:
        """Return at once."""
        return True

    def started(self, key: RequestKey) -> None:
        """See ``Link``."""
        self._keys[key].started(key, self.worker.now)

    def computed(
        self, key: RequestKey, tables: BlockTables, tokens: int, done: Fence, hashes: object
    ) -> None:
        """See ``Link``."""
        self._keys[key].computed(key, tokens, self.worker.now)

    def final(self, key: RequestKey, first: Sequence[FirstToken], finish: str | None) -> None:
        """See ``Link``."""
        self._keys[key].final(key, first, finish, self.worker.now)

    def finished(self, key: RequestKey) -> None:
        """See ``Link``."""
        self._keys.pop(key).finished(key, self.worker.now)


class Consuming(_End):
    """A decode worker's hand-offs."""

    def peer_up(self, producer: Incarnation) -> bool:
        """Return whether there is a link."""
        return producer in self.links

    def open(self, key: RequestKey, producer: Incarnation, *, budget_ms: int | None) -> None:
        """The request's KV comes from there."""
        self._keys[key] = self.links[producer]

    def begin_load(
        self, key: RequestKey, tables: BlockTables, start: int, stop: int, hashes: object
    ) -> None:
        """See ``Link``."""
        self._keys.pop(key).load(key, start, self.worker.now)
