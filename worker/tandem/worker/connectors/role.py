"""Parts of a role that also pulls and lends prefixes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from torch import Tensor

from tandem.engine.scheduler.connector import KVConnector
from tandem.engine.scheduler.connectors import compose
from tandem.kvtransfer.config import KVTransferConfig
from tandem.kvtransfer.events import ConsumerEvent, ProducerEvent
from tandem.kvtransfer.service.consumer import HandoffConsumer
from tandem.kvtransfer.service.producer import HandoffProducer
from tandem.memory.shared import shared_tensor
from tandem.protocol.ids import Incarnation
from tandem.protocol.messages import PeerHealth
from tandem.worker.connectors.prefix_fetch import LendConnector, PullConnector, PullMetrics
from tandem.worker.handoff import HandoffService
from tandem.worker.launch import RoleContext, RoleParts


def kv_cache_allocator(
    config: KVTransferConfig, *, on_gpu: bool = False
) -> Callable[[int], Tensor] | None:
    """Return a function from bytes to flat uint8 memory that ``kv_connector`` can share; None for
    the engine's own, as for a GPU."""
    near = config.kv_connector == "auto" and config.kv_node_folder is not None
    return (
        shared_tensor
        if not on_gpu and (near or config.kv_connector in ("shm", "shm_agent"))
        else None
    )


class BothWays:
    """HandoffService of a producer and a consumer."""

    def __init__(self, gives: HandoffService, takes: HandoffService) -> None:
        self._gives = gives
        self._takes = takes

    def set_peers(self, controls: Mapping[str, Incarnation]) -> None:
        self._takes.set_peers(controls)

    def peer_health(self) -> tuple[PeerHealth, ...]:
        return self._takes.peer_health()

    def progress(self) -> int:
        return self._gives.progress() + self._takes.progress()

    def expected(self) -> float:
        """Return the consumer's value: only it receives KV."""
        return self._takes.expected()

    def leased_blocks(self) -> int:
        return self._gives.leased_blocks()

    def problem(self) -> str | None:
        return self._gives.problem() or self._takes.problem()

    def ended(self) -> str | None:
        return self._gives.ended() or self._takes.ended()

    def keeps_awake(self) -> str | None:
        return self._gives.keeps_awake() or self._takes.keeps_awake()

    def sleep(self) -> int:
        return self._gives.sleep() + self._takes.sleep()

    def wake_up(self) -> None:
        self._gives.wake_up()
        self._takes.wake_up()

    def note_progress(self, engine_step: int, has_work: bool) -> None:
        self._gives.note_progress(engine_step, has_work)
        self._takes.note_progress(engine_step, has_work)

    def close(self) -> None:
        self._gives.close()
        self._takes.close()


Event = TypeVar("Event", bound=ConsumerEvent | ProducerEvent)


class SplitEvents(Generic[Event]):
    """Splitter of a service's ``poll`` for two callers in one thread."""

    def __init__(self, poll: Callable[[], Iterable[Event]]) -> None:
        self._poll = poll
        self._of_pulls: deque[Event] = deque()
        self._of_handoffs: deque[Event] = deque()

    def of_pulls(self) -> list[Event]:
        """Return the new events of keys made by ``RequestKey.for_pull``."""
        return self._taken(self._of_pulls)

    def of_handoffs(self) -> list[Event]:
        return self._taken(self._of_handoffs)

    def _taken(self, queue: deque[Event]) -> list[Event]:
        for event in self._poll():
            (self._of_pulls if event.key.is_pull else self._of_handoffs).append(event)
        found = list(queue)
        queue.clear()
        return found


def make_producer(context: RoleContext, kv: KVTransferConfig) -> HandoffProducer:
    """Return a started HandoffProducer. Raises TransportError, AddressInUse."""
    (region,) = context.executor.regions()
    producer = HandoffProducer(
        kv,
        kv_cache=region.blocks,
        layout=context.capacity.layout,
        num_blocks=context.capacity.num_blocks,
        fingerprint=context.fingerprint,
        incarnation=context.incarnation,
        registry=context.registry,
        notify=context.notify,
        guard=context.guard,
        kv_scales=context.config.row_scales,
    )
    producer.start()
    return producer


def make_consumer(context: RoleContext, kv: KVTransferConfig) -> HandoffConsumer:
    """Return a started HandoffConsumer. Raises TransportError."""
    (region,) = context.executor.regions()
    consumer = HandoffConsumer(
        kv,
        kv_cache=region.blocks,
        layout=context.capacity.layout,
        num_blocks=context.capacity.num_blocks,
        fingerprint=context.fingerprint,
        incarnation=context.incarnation,
        registry=context.registry,
        notify=context.notify,
        guard=context.guard,
        kv_scales=context.config.row_scales,
    )
    consumer.start()
    return consumer


@dataclass(frozen=True, slots=True)
class Ends:
    """Both services of a worker, with their events split by kind."""

    producer: HandoffProducer
    consumer: HandoffConsumer
    given: SplitEvents[ProducerEvent]
    taken: SplitEvents[ConsumerEvent]

    @classmethod
    def of(cls, producer: HandoffProducer, consumer: HandoffConsumer) -> Ends:
        """Make both; only this class calls their ``poll`` afterwards."""
        given, taken = SplitEvents(producer.poll), SplitEvents(consumer.poll)
        return cls(producer, consumer, given, taken)


def lending_only(kv: KVTransferConfig) -> KVTransferConfig:
    """Return settings of a worker that only lends: slots and quota are those of loans."""
    return replace(kv, kv_lease_quota=kv.kv_pull_quota, kv_lease_backlog=1.0)


def with_pulls(
    context: RoleContext, kv: KVTransferConfig, ends: Ends, own: KVConnector, *, lends_only: bool
) -> RoleParts:
    """Return a role's parts with connectors in order: ``own``, pulls, tier in host memory.
    ``lends_only``: the worker hands over nothing else."""
    metrics = PullMetrics(context.registry)
    size = context.capacity.layout.block_size
    tier = context.config.cache.kv_offloading_size is not None
    asked = ends.producer.poll if lends_only else ends.given.of_pulls
    lender = LendConnector(ends.producer, kv.kv_pull_quota, metrics, poll=asked)
    pulls = PullConnector(ends.consumer, size, metrics, poll=ends.taken.of_pulls, has_tier=tier)
    return RoleParts(
        BothWays(ends.producer, ends.consumer),
        compose([own, pulls, lender]),
        ends.producer.control,
        None if lends_only else ends.producer.max_tokens,
        kv.kv_pull_peers,
        lender.lend_from,
    )
