"""Links are probed before use, and again while nothing uses them."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
from tests.kvtransfer.builders import Consumer, Producer, make_config, make_key
from tests.kvtransfer.memory_transport import MemoryTransport

from tandem.kvtransfer import events
from tandem.kvtransfer.config import KVTransferConfig
from tandem.kvtransfer.control.channel import now_ms
from tandem.kvtransfer.mover import prober, throughput
from tandem.kvtransfer.transports.base import Check, Extent, Progress, Ticket
from tandem.protocol.ids import Incarnation, new_incarnation

CONNECTORS = pytest.mark.parametrize("connector", ["tcp", "shm"])


class Sieve(MemoryTransport):
    """Reads of patterns wait, others do not."""

    holds_patterns = False

    def __init__(self) -> None:
        super().__init__()
        self.held: set[Ticket] = set()

    def read(self, peer: Incarnation, extents: Sequence[Extent]) -> Ticket:
        ticket = super().read(peer, extents)
        if extents[0].check is Check.PATTERN:
            self.held.add(ticket)
        return ticket

    def poll(self, ticket: Ticket) -> Progress:
        if ticket in self.held and self.holds_patterns:
            return Progress.PENDING
        self.held.discard(ticket)
        return super().poll(ticket)


@pytest.fixture
def at_will(monkeypatch):
    """A link that nothing uses is probed again twice, and when the test says so."""
    monkeypatch.setattr(prober, "AGAIN_MS", (600_000, 600_000))


def probe_again(consumer: Consumer, best: float | None = None) -> None:
    """The one link that nothing uses is due now; its best rate so far was ``best``."""
    mover = consumer.service._mover
    ((peer, unused),) = mover.prober._unused.items()
    if best is not None:
        unused.best = best
        mover.book.faster(peer, best)
    unused.at = now_ms()


def connecting(seconds: float) -> KVTransferConfig:
    return make_config(kv_connector="memory", kv_connect_seconds=seconds)


def probes(consumer: Consumer) -> float:
    """Patterns that have come and were right."""
    return consumer.metric("tandem:kv_link_probe_bytes_per_second_count")


@CONNECTORS
def test_a_link_that_nothing_uses_is_probed_again(workers, at_will, connector):
    """The machine of workers that start is busy, and nothing else tells placement of such a link:
    its best rate counts. It stays up meanwhile, and is left alone after a while."""
    config = make_config(kv_connector=connector)
    producer, consumer = workers(Producer, config), workers(Consumer, config)
    consumer.meet(producer)
    own = consumer.service._mover.prober
    probe_again(consumer, best=1.0)
    consumer.until(lambda: consumer.service.peer_health()[0].probed_bytes_per_s > 1.0)
    assert consumer.service.peer_up(producer.incarnation)
    probe_again(consumer, best=1e15)
    consumer.until(lambda: probes(consumer) == 3)
    assert consumer.service.peer_health()[0].probed_bytes_per_s == 1e15
    assert not own._probing
    assert own.rest(now_ms()) is None, "it is probed no more, and not slept for"


def test_a_link_that_is_used_is_not_probed_again(workers, at_will):
    """Its rate is measured by what it is used for."""
    producer, consumer = workers(Producer), workers(Consumer)
    consumer.meet(producer)
    own = consumer.service._mover.prober
    (unused,) = own._unused.values()
    key = make_key("over")
    consumer.open(key, producer.incarnation)
    producer.hand_over(key, 12, [0, 1, 2], consumer.incarnation)
    consumer.load(key, [5, 6, 7])
    consumer.wait_for(events.Loaded, key)
    unused.at = now_ms()
    seen, end = probes(consumer), time.monotonic() + 0.4
    consumer.until(lambda: time.monotonic() > end)
    assert probes(consumer) == seen == 1
    assert not own._unused


def test_a_later_probe_during_which_kv_comes_judges_nothing(workers, at_will, monkeypatch):
    """KV measures the link from then on; the probe is not taken for the link's first."""
    config = connecting(60.0)
    producer, transport = workers(Producer, config), Sieve()
    consumer = workers(Consumer, config, transports={"memory": transport})
    consumer.meet(producer)
    mover = consumer.service._mover
    seen, usable = [], mover.usable

    def noted(peer, bytes_per_s):
        seen.append(peer)
        usable(peer, bytes_per_s)

    monkeypatch.setattr(mover, "usable", noted)
    transport.holds_patterns = True
    probe_again(consumer)
    consumer.until(lambda: transport.held)
    key = make_key("over")
    consumer.open(key, producer.incarnation)
    producer.hand_over(key, 12, [0, 1, 2], consumer.incarnation)
    consumer.load(key, [5, 6, 7])
    consumer.wait_for(events.Loaded, key)
    had = probes(consumer)
    transport.holds_patterns = False
    consumer.until(lambda: probes(consumer) == had + 1)
    end = time.monotonic() + 0.3
    consumer.until(lambda: time.monotonic() > end)
    assert not seen
    assert consumer.service.peer_up(producer.incarnation)


def test_a_link_that_was_used_long_ago_is_probed_again(workers, at_will, monkeypatch):
    """Its pace is unknown again, and the pattern's best rate stands in for it."""
    producer, consumer = workers(Producer), workers(Consumer)
    consumer.meet(producer)
    key = make_key("over")
    consumer.open(key, producer.incarnation)
    producer.hand_over(key, 12, [0, 1, 2], consumer.incarnation)
    consumer.load(key, [5, 6, 7])
    consumer.wait_for(events.Loaded, key)
    mover = consumer.service._mover
    mover.throughput._links[producer.incarnation].throughput = 1.0
    assert not mover.prober._unused
    monkeypatch.setattr(throughput, "IDLE_SECONDS", 0.3)
    consumer.until(lambda: mover.prober._unused)
    probe_again(consumer, best=1.0)
    consumer.until(lambda: consumer.service.peer_health()[0].probed_bytes_per_s > 1.0)
    assert consumer.service.peer_health()[0].bytes_per_s == 0.0
    assert consumer.service.peer_up(producer.incarnation)


def test_a_link_that_is_up_stays_so_though_a_later_probe_hangs(workers, at_will):
    """Its slot is nobody's until the read has ended."""
    config = connecting(60.0)
    producer = workers(Producer, config)
    transport = MemoryTransport()
    consumer = workers(Consumer, config, transports={"memory": transport})
    consumer.meet(producer)
    mover = consumer.service._mover
    ring = mover.table.ring
    transport.hold.set()
    probe_again(consumer)
    consumer.until(lambda: transport._reads)
    mover.prober._probing[producer.incarnation].until = now_ms()
    consumer.until(lambda: ring.quarantined)
    assert consumer.service.peer_up(producer.incarnation)
    transport.hold.clear()
    consumer.until(lambda: ring.free == len(ring))
    assert consumer.service.peer_up(producer.incarnation)
    assert mover.prober._unused, "no KV has come by the link"
    assert not mover.throughput._links


def test_a_link_that_is_up_stays_so_though_others_hold_all_slots(workers, at_will):
    """A later probe has none to land in: it waits a while, and is let be."""
    config = make_config(kv_connect_seconds=60.0)
    producer, consumer = workers(Producer, config), workers(Consumer, config)
    consumer.meet(producer)
    mover = consumer.service._mover
    ring, other = mover.table.ring, new_incarnation()
    ring.per_peer = len(ring)
    held = [ring.take(other, make_key("other"), at) for at in range(len(ring))]
    probe_again(consumer)
    consumer.until(lambda: any(each.nbytes for each in mover.prober._probing.values()))
    mover.prober._probing[producer.incarnation].until = now_ms()
    consumer.until(lambda: not mover.prober._probing)
    assert consumer.service.peer_up(producer.incarnation)
    for slot in held:
        ring.give(slot)


def test_a_link_whose_later_probe_is_wrong_is_given_up(workers, at_will):
    config = make_config(kv_connector="memory")
    producer, consumer = workers(Producer, config), workers(Consumer, config)
    consumer.meet(producer)
    memory = producer.service._mover.memory
    memory.rows[memory.count - 1, 100] ^= 1
    probe_again(consumer)
    consumer.until(lambda: not consumer.service.peer_up(producer.incarnation))
