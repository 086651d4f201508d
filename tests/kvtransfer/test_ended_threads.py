"""Threads of a hand-off that have ended by a fault, at either end: what the other end, the engine
and the probes hear."""

from __future__ import annotations

import math

import pytest
from tests.kvtransfer.builders import Consumer, Producer, make_config, make_key, only

from tandem.kvtransfer import events
from tandem.kvtransfer.control.mail import Drop
from tandem.kvtransfer.memory.blocks import CLEARED
from tandem.kvtransfer.transports.mapped import transport as mapped_transport
from tandem.protocol.errors import FailCause
from tandem.protocol.ids import Incarnation

KEY = make_key("late")


def breaks(*_):
    raise RuntimeError("a fault of the test")


@pytest.mark.parametrize("hears", [True, False], ids=["hears of it", "hears nothing"])
@pytest.mark.parametrize("connector", ["memory_blocks", "shm"])
def test_blocks_that_a_dead_transfer_thread_had_leased_are_never_used(
    workers, monkeypatch, connector, hears
):
    """A decode worker that waited for blocks of its own meanwhile knows all it needs to copy them;
    the control thread goes on beating."""
    config = make_config(kv_connector=connector)
    producer, consumer = workers(Producer, config), workers(Consumer, config)
    consumer.meet(producer)
    consumer.open(KEY, producer.incarnation)
    producer.hand_over(KEY, 8, [0, 1], consumer.incarnation)
    ready = consumer.wait_for(events.Ready, KEY)
    pulls = consumer.service._mover.table.pulls
    consumer.until(lambda: pulls[KEY].final is not None and pulls[KEY].upto == 8)
    mover, post = producer.service._mover, producer.service._channel.post
    if not hears:

        def keeps(item):
            if not isinstance(item, Drop):
                post(item)

        monkeypatch.setattr(producer.service._channel, "post", keeps)

    mover.take = breaks
    producer.service.cancel(make_key("any"))
    producer.wait_for(events.Released, KEY)
    assert all(mover.blocks.tags.read(block) == CLEARED for block in range(64))
    producer.kv_cache.fill_(9)
    if hears:
        failed = consumer.wait_for(events.LoadFailed, KEY)
        assert failed.cause is FailCause.PEER
        consumer.until(
            lambda: "fault of the test" in consumer.service.why_down(producer.incarnation)
        )
        return
    consumer.service.begin_load(KEY, only([4, 5]), 0, ready.num_tokens)
    end = consumer.wait_for((events.LoadFailed, events.Loaded), KEY)
    assert isinstance(end, events.LoadFailed), "another's KV was used"


@pytest.mark.parametrize("thread", ["transfer", "control"])
def test_a_consumer_whose_thread_has_ended_offers_itself_for_nothing_more(
    workers, monkeypatch, thread
):
    """Routers learn it from the health of its links, at once; what is open ends, and its producers
    keep nothing for it."""
    producer, consumer = workers(Producer), workers(Consumer)
    consumer.meet(producer)
    peer, service = producer.incarnation, consumer.service
    told = []
    monkeypatch.setattr(service._channel, "on_end", lambda: told.append(service.peer_up(peer)))
    consumer.open(KEY, peer)
    producer.hand_over(KEY, 8, [0, 1], consumer.incarnation)
    consumer.wait_for(events.Ready, KEY)
    assert service.ended() is None
    if thread == "transfer":
        service._mover.take = breaks
        service.cancel(make_key("any"))
    else:
        service._channel.on_tick = breaks
    consumer.wait_for(events.LoadFailed, KEY)
    assert "fault of the test" in consumer.until(service.ended)
    assert not service.peer_up(peer)
    assert "fault of the test" in service.why_down(peer)
    assert [(each.up, each.reason) for each in service.peer_health()] == [(False, service.ended())]
    producer.wait_for(events.Released, KEY)
    service.set_peers([producer.service.control])
    producer.until(lambda: not producer.service.consumers())
    late = make_key("later")
    consumer.open(late, peer)
    consumer.wait_for(events.LoadFailed, late)
    if thread == "control":
        consumer.until(lambda: told)
        assert told == [False]


class Late:
    """Behind copies of a device that is slow, or hangs."""

    due = math.inf

    def __init__(self) -> None:
        self.through = False

    def done(self) -> bool:
        return self.through


@pytest.mark.parametrize("hangs", [False, True])
def test_blocks_that_a_device_writes_as_the_transfer_thread_ends_are_not_given_back(
    workers, monkeypatch, hangs
):
    """They were after five seconds, whatever still wrote them; and till then the worker took
    hand-offs. Nothing is given back of copies that do not end: the worker is replaced."""
    late, config = Late(), make_config(kv_connector="shm")
    monkeypatch.setattr(mapped_transport, "STOP_SECONDS", 0.05 if hangs else 60.0)
    producer, consumer = workers(Producer, config), workers(Consumer, config)
    consumer.meet(producer)
    service, mover = consumer.service, consumer.service._mover
    mover.parts.transports["shm"]._copier.mark = lambda: late
    cancelled = make_key("cancelled")
    for key, blocks in ((cancelled, [0, 1]), (KEY, [2, 3])):
        consumer.open(key, producer.incarnation)
        producer.hand_over(key, 8, blocks, consumer.incarnation)
        consumer.load(key, blocks)
    consumer.until(lambda: sum(read.slot is None for read, _ in mover.reads._open.values()) == 2)
    service.cancel(cancelled)
    assert not consumer.wait_for(events.Cancelled, cancelled).blocks_free
    mover.take = breaks
    service.cancel(make_key("any"))
    consumer.until(service.ended)
    assert not any(isinstance(each, events.Released) for each in consumer.seen)
    if not hangs:
        assert mover.alive, "it waits for them"
        assert not service.peer_up(producer.incarnation)
    late.through = not hangs
    assert consumer.wait_for(events.LoadFailed, KEY).blocks_free is not hangs
    freed = [each.key for each in consumer.seen if isinstance(each, events.Released)]
    assert freed == ([] if hangs else [cancelled])
    assert service.has_pending() is hangs
    late.through = True


def test_a_key_that_ends_as_the_thread_does_ends_once(workers, monkeypatch):
    """It was told by the thread, and again by who found the thread gone."""
    service = workers(Consumer).service
    mover, taken = service._mover, service._mover.events

    def meanwhile():
        monkeypatch.setattr(mover, "events", taken)
        mover.stop()
        return []

    service.open(KEY, Incarnation(b"p" * 16), budget_ms=None)
    monkeypatch.setattr(mover, "events", meanwhile)
    seen = [*service.poll(), *service.poll(), *service.poll()]
    assert [type(each) for each in seen] == [events.LoadFailed]


def test_a_producer_whose_control_thread_has_ended_keeps_nothing_for_its_consumers(workers):
    """What it leased is its engine's again, long before the lease's cap."""
    producer, consumer = workers(Producer), workers(Consumer)
    consumer.meet(producer)
    consumer.open(KEY, producer.incarnation)
    producer.hand_over(KEY, 8, [0, 1], consumer.incarnation)
    consumer.wait_for(events.Ready, KEY)
    producer.service._channel.on_tick = breaks
    assert consumer.wait_for(events.LoadFailed, KEY).cause is FailCause.PEER
    producer.wait_for(events.Released, KEY)
    assert "fault of the test" in producer.service.ended()
