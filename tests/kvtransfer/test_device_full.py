"""A device that has no room for what lies between a part and its slot: one hand-off ends."""

from __future__ import annotations

import logging

import pytest
import torch
from tests.kvtransfer.builders import Consumer, Producer, make_config, make_key
from tests.kvtransfer.hand_stream import HandStream

from tandem.kvtransfer import events
from tandem.kvtransfer.memory.device_slots import HostSlotsOfDevice
from tandem.kvtransfer.mover import make_slots
from tandem.protocol.errors import FailCause

KEY, NEXT = make_key("one"), make_key("two")


@pytest.fixture
def pair(workers, monkeypatch):
    """A linked pair whose slots are a device's on the host."""

    def make(count, slot_bytes, kv_cache, traits):
        return HostSlotsOfDevice(count, slot_bytes, kv_cache, HandStream())

    monkeypatch.setattr(make_slots, "make_slots", make)
    config = make_config(kv_slots_per_peer=2, kv_credits=2)
    producer, consumer = workers(Producer, config), workers(Consumer, config)
    consumer.meet(producer)
    return producer, consumer


def full_once(worker, name: str) -> HandStream:
    """The first part finds no room, and the device is behind; what it is to be through with."""
    memory = worker.service._mover.memory
    call, stream = getattr(memory, name), memory._stream
    assert isinstance(stream, HandStream)

    def fails(*args):
        setattr(memory, name, call)
        stream.hold.set()
        raise torch.OutOfMemoryError("CUDA out of memory")

    setattr(memory, name, fails)
    return stream


def hand_over(pair, key, blocks, to) -> None:
    producer, consumer = pair
    consumer.open(key, producer.incarnation)
    producer.hand_over(key, 8, blocks, consumer.incarnation)
    consumer.load(key, to)


def next_goes_through(pair) -> None:
    """Both threads live, and all slots come back."""
    consumer = pair[1]
    hand_over(pair, NEXT, [6, 7], [8, 9])
    consumer.wait_for(events.Loaded, NEXT)
    assert consumer.holds("two", 8, [8, 9])
    for end in pair:
        ring = end.service._mover.table.ring
        end.until(lambda ring=ring: ring.free == len(ring))
        assert end.service.ended() is None


def test_a_part_that_finds_no_room_to_be_packed_ends_its_hand_off(pair, caplog):
    """With all others of the worker, it ended the transfer thread. The slot is another's once the
    device is through with what was queued for it."""
    producer, consumer = pair
    stream = full_once(producer, "pack")
    with caplog.at_level(logging.WARNING):
        hand_over(pair, KEY, [0, 1], [4, 5])
        mover = producer.service._mover
        producer.until(lambda: mover._packs.under_way)
    assert mover.table.ring.free < len(mover.table.ring)
    stream.hold.clear()
    failed = consumer.wait_for(events.LoadFailed, KEY)
    assert failed.cause is FailCause.GONE
    assert "internal" in failed.message
    producer.wait_for(events.Released, KEY)
    assert "cannot be packed: CUDA out of memory" in caplog.text
    next_goes_through(pair)


@pytest.mark.parametrize("name", ["inspect", "unpack"])
def test_a_part_that_finds_no_room_to_be_unpacked_ends_its_hand_off(pair, caplog, name):
    """D's blocks are its engine's again once the device is through with what was queued."""
    producer, consumer = pair
    stream = full_once(consumer, name)
    with caplog.at_level(logging.WARNING):
        hand_over(pair, KEY, [0, 1], [4, 5])
        consumer.until(lambda: consumer.service._mover._unpacks.written())
    assert not any(isinstance(each, events.LoadFailed) for each in consumer.seen)
    stream.hold.clear()
    failed = consumer.wait_for(events.LoadFailed, KEY)
    assert failed.cause is FailCause.INTERNAL
    assert "no room" in failed.message
    if not failed.blocks_free:  # another part of it is unpacked
        consumer.wait_for(events.Released, KEY)
    producer.wait_for(events.Released, KEY)
    assert "cannot be unpacked: CUDA out of memory" in caplog.text
    next_goes_through(pair)
