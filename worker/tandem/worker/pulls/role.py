"""Parts of a role with pulls of prefixes: the other half of the hand-off, and two connectors."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tandem.engine.scheduler.connector import KVConnector
from tandem.engine.scheduler.connectors import compose
from tandem.kvtransfer.config import KVTransferConfig
from tandem.kvtransfer.events import ConsumerEvent, ProducerEvent
from tandem.kvtransfer.service.consumer import HandoffConsumer
from tandem.kvtransfer.service.producer import HandoffProducer
from tandem.worker.launch import RoleContext, RoleParts
from tandem.worker.pulls.connector import PullConnector
from tandem.worker.pulls.lender import LendConnector
from tandem.worker.pulls.metrics import PullMetrics
from tandem.worker.pulls.services import BothWays
from tandem.worker.pulls.split import SplitEvents


def make_producer(context: RoleContext, kv: KVTransferConfig) -> HandoffProducer:
    """Return a started HandoffProducer. Raises TransportError, AddressInUse."""
    (region,) = context.executor.regions()
    producer = HandoffProducer(
        kv,
        slab=region.blocks,
        layout=context.capacity.layout,
        num_blocks=context.capacity.num_blocks,
        fingerprint=context.fingerprint,
        incarnation=context.incarnation,
        registry=context.registry,
        notify=context.notify,
        guard=context.guard,
    )
    producer.start()
    return producer


def make_consumer(context: RoleContext, kv: KVTransferConfig) -> HandoffConsumer:
    """Return a started HandoffConsumer. Raises TransportError."""
    (region,) = context.executor.regions()
    consumer = HandoffConsumer(
        kv,
        slab=region.blocks,
        layout=context.capacity.layout,
        num_blocks=context.capacity.num_blocks,
        fingerprint=context.fingerprint,
        incarnation=context.incarnation,
        registry=context.registry,
        notify=context.notify,
        guard=context.guard,
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
        """Return both services, whose ``poll`` only this class calls from now on."""
        given, taken = SplitEvents(producer.poll), SplitEvents(consumer.poll)
        return cls(producer, consumer, given, taken)


def lending_only(kv: KVTransferConfig) -> KVTransferConfig:
    """Return the settings of a worker that only lends: slots and quota are those of loans."""
    return replace(kv, kv_lease_quota=kv.kv_pull_quota, kv_lease_backlog=1.0)


def with_pulls(
    context: RoleContext, kv: KVTransferConfig, ends: Ends, own: KVConnector, *, lends_only: bool
) -> RoleParts:
    """A role's parts with its ``own`` connector first: hand-offs go before pulls, pulls before the
    tier in host memory. ``lends_only``: the worker hands over nothing else."""
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
        None if lends_only else ends.producer.max_blocks * size,
        kv.kv_pull_peers,
        lender.lend_from,
    )
