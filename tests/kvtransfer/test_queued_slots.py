"""Parts whose packing and unpacking are queued on a device, with a queue that tests hold."""

from __future__ import annotations

import pytest
import torch
from tests.kvtransfer.builders import Consumer, Producer, make_config, make_key, only
from tests.kvtransfer.hand_stream import HandStream

from tandem.kernels.blocks import digest
from tandem.kvtransfer import events
from tandem.kvtransfer.memory.device_slots import DeviceSlots, HostSlotsOfDevice
from tandem.kvtransfer.memory.packing import (
    HEADER_BYTES,
    NOBODYS,
    WHOLE,
    NarrowPacking,
    Packing,
    PartPacking,
    read_header,
)
from tandem.kvtransfer.memory.slots import slot_bytes_for
from tandem.kvtransfer.mover import make_slots
from tandem.protocol.errors import FailCause, WireError

BLOCK_BYTES = 1000
KINDS = [DeviceSlots, HostSlotsOfDevice]
KEY = make_key("one")
HEADER = NOBODYS._replace(part=3, nbytes=HEADER_BYTES + 3 * BLOCK_BYTES)


def slab_of(blocks: int) -> torch.Tensor:
    return torch.randint(0, 256, (blocks, BLOCK_BYTES), dtype=torch.uint8)


def slots_of(kind, kv_cache: torch.Tensor, stream: HandStream):
    return kind(3, slot_bytes_for(0, 3 * BLOCK_BYTES), kv_cache, stream)


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_goes_through_a_slot(kind):
    """With its header and digest, which are seen as they arrived; trying it out leaves no trace."""
    kv_cache, stream = slab_of(16), HandStream()
    before = kv_cache.clone()
    slots = slots_of(kind, kv_cache, stream)
    assert torch.equal(kv_cache, before)
    with pytest.raises(WireError):
        read_header(slots.read(0, HEADER_BYTES))
    assert slots.pack(kv_cache, [3, 11, 5], 1, HEADER).done()
    found = digest(before[[3, 11, 5]])
    assert read_header(slots.read(1, HEADER_BYTES)) == HEADER._replace(digest=found)
    inspected = slots.inspect(1, HEADER.nbytes)
    assert inspected.done()
    assert read_header(inspected.found().header).digest == inspected.found().digest == found
    assert slots.unpack(1, [0, 7, 15], kv_cache).done()
    before[[0, 7, 15]] = before[[3, 11, 5]]
    assert torch.equal(kv_cache, before)


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_numbers_of_parts_stay_on_the_host(kind, narrow):
    """Who copies parts reads them: from the device, that would wait for all that is queued there.
    As few as whole blocks could be, too."""
    noted = []

    class Noting(PartPacking):
        def pack(self, kv_cache, ids, payload):
            noted.append(ids)
            super().pack(kv_cache, ids, payload)

        def unpack(self, payload, ids, kv_cache):
            noted.append(ids)
            super().unpack(payload, ids, kv_cache)

    kv_cache = torch.randn(16, 512).to(torch.float16).view(torch.uint8)
    slots = slots_of(kind, kv_cache, HandStream())
    packing: Packing = Noting(nbytes=1024, parts=2, rows=2)
    if narrow:
        kv_cache.zero_()  # which float8 holds as it is
        packing = NarrowPacking(packing, 2, torch.float16)
    before = kv_cache.clone()
    assert slots.pack(kv_cache, [3], 1, HEADER, packing).done()
    assert slots.unpack(1, [0], kv_cache, packing).done()
    halves = kv_cache.view(16, 2, 2, -1)
    assert torch.equal(halves[0, :, 0], before.view(16, 2, 2, -1)[1, :, 1])
    assert [ids.tolist() for ids in noted] == [[3], [0]]
    there = getattr(slots, "_ids_there", kv_cache)
    assert all(ids.untyped_storage().data_ptr() != there.data_ptr() for ids in noted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_a_slot_holds_as_many_blocks_as_fit_it_as_fp8(kind, dtype):
    """More than fit it as they are held: parts are cut by what they come to on the way."""
    kv_cache = torch.randn(32, 2048 // dtype.itemsize).to(dtype).view(torch.uint8)
    packing = NarrowPacking(WHOLE, 2, dtype)
    slots = kind(2, slot_bytes_for(0, 3 * kv_cache.shape[1]), kv_cache, HandStream())
    count = (slots.slot_bytes - HEADER_BYTES) // packing.block_bytes(kv_cache)
    ids = list(range(count))
    assert count * kv_cache.shape[1] > slots.slot_bytes
    before = kv_cache.view(dtype).clone()
    assert slots.pack(kv_cache, ids, 1, HEADER, packing).done()
    kv_cache.zero_()
    assert slots.unpack(1, ids[::-1], kv_cache, packing).done()
    found, wanted = kv_cache.view(dtype)[ids[::-1]].float(), before[:count].float()
    assert torch.allclose(found, wanted, rtol=1 / 16, atol=float(wanted.abs().amax()) * 2**-17)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_done_before_the_device_is(kind):
    """A packed slot on the host has no header that could be read until then."""
    kv_cache, stream = slab_of(16), HandStream()
    slots = slots_of(kind, kv_cache, stream)
    stream.hold.set()
    packed = slots.pack(kv_cache, [1], 0, HEADER)
    assert not packed.done()
    if kind is HostSlotsOfDevice:
        with pytest.raises(WireError):
            read_header(slots.read(0, HEADER_BYTES))
    stream.hold.clear()
    assert packed.done()
    assert read_header(slots.read(0, HEADER_BYTES)).part == 3
    for ask in (lambda: slots.inspect(0, HEADER.nbytes), lambda: slots.unpack(0, [2], kv_cache)):
        stream.hold.set()
        asked = ask()
        assert not asked.done()
        stream.hold.clear()
        assert asked.done()


@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_byte_gives_another_digest_than_the_headers(kind):
    kv_cache, stream = slab_of(16), HandStream()
    slots = slots_of(kind, kv_cache, stream)
    assert slots.pack(kv_cache, [4, 5], 2, HEADER).done()
    slots.rows[2, HEADER_BYTES + 1500] ^= 1
    found = slots.inspect(2, HEADER_BYTES + 2 * BLOCK_BYTES).found()
    assert read_header(found.header).digest != found.digest


def test_more_parts_than_stages_are_unpacked_from_their_own_bytes():
    """Between the host and a slab, what was summed may be another's by the time it is wanted."""
    kv_cache, stream = slab_of(32), HandStream()
    slots = HostSlotsOfDevice(6, slot_bytes_for(0, 3 * BLOCK_BYTES), kv_cache, stream)
    before = kv_cache.clone()
    for slot in range(6):
        assert slots.pack(kv_cache, [slot], slot, HEADER).done()
    for slot in range(6):
        slots.inspect(slot, HEADER_BYTES + BLOCK_BYTES)
    for slot in (5, 0, 4, 1, 3, 2):
        slots.unpack(slot, [16 + slot], kv_cache)
    before[16:22] = before[:6]
    assert torch.equal(kv_cache, before)


@pytest.fixture
def queued(workers, monkeypatch):
    """Make a linked pair whose slots are a device's on the host, and the queue of each end."""
    streams = []

    def make(count, slot_bytes, kv_cache, traits):
        streams.append(HandStream())
        return HostSlotsOfDevice(count, slot_bytes, kv_cache, streams[-1])

    monkeypatch.setattr(make_slots, "make_slots", make)
    config = make_config(kv_slots_per_peer=2, kv_credits=2)
    producer, consumer = workers(Producer, config), workers(Consumer, config)
    consumer.meet(producer)
    return producer, consumer, *streams


def test_parts_are_sent_and_loaded_when_the_devices_are_through(queued):
    """Until then P says nothing of them, and D's engine hears nothing; all slots are free again."""
    producer, consumer, packing, unpacking = queued
    packing.hold.set()
    unpacking.hold.set()
    consumer.open(KEY, producer.incarnation)
    producer.hand_over(KEY, 24, list(range(6)), consumer.incarnation)
    consumer.load(KEY, list(range(10, 16)))
    packs, unpacks = producer.service._mover._packs, consumer.service._mover._unpacks
    producer.until(lambda: packs.under_way and not packs.waits)
    other = make_key("two")  # another's messages pass meanwhile
    consumer.open(other, producer.incarnation)
    assert producer.admit(other, 8, consumer.incarnation) is None
    producer.service.cancel(other)
    consumer.wait_for(events.LoadFailed, other)
    ring = consumer.service._mover.table.ring
    assert ring.free == len(ring), "nothing is read"
    packing.hold.clear()
    consumer.until(lambda: unpacks.under_way and not unpacks.waits)
    assert not any(isinstance(each, events.Loaded) for each in consumer.seen)
    unpacking.hold.clear()
    consumer.wait_for(events.Loaded, KEY)
    assert consumer.holds("one", 24, list(range(10, 16)))
    producer.wait_for(events.Released, KEY)
    for end in (producer, consumer):
        ring = end.service._mover.table.ring
        end.until(lambda ring=ring: ring.free == len(ring))


def test_a_slot_that_is_packed_comes_back_when_the_device_is_through(queued):
    """P's engine has its blocks at once; the slot is not another's before."""
    producer, consumer, packing, _ = queued
    packing.hold.set()
    consumer.open(KEY, producer.incarnation)
    producer.hand_over(KEY, 8, [0, 1], consumer.incarnation)
    consumer.load(KEY, [4, 5])
    mover = producer.service._mover
    producer.until(lambda: mover._packs.under_way)
    producer.service.cancel(KEY)
    producer.wait_for(events.Released, KEY)
    assert mover.table.ring.free < len(mover.table.ring)
    packing.hold.clear()
    producer.until(lambda: mover.table.ring.free == len(mover.table.ring))
    assert consumer.wait_for(events.LoadFailed, KEY).cause is FailCause.GONE


def test_blocks_that_are_unpacked_come_back_when_the_device_is_through(queued):
    """A cancelled request's blocks are written until then."""
    producer, consumer, _, unpacking = queued
    unpacking.hold.set()
    consumer.open(KEY, producer.incarnation)
    producer.hand_over(KEY, 8, [0, 1], consumer.incarnation)
    consumer.load(KEY, [4, 5])
    consumer.until(lambda: consumer.service._mover._unpacks.under_way)
    consumer.service.cancel(KEY)
    assert not consumer.wait_for(events.Cancelled, KEY).blocks_free
    assert not any(isinstance(each, events.Released) for each in consumer.seen)
    unpacking.hold.clear()
    consumer.wait_for(events.Released, KEY)


def test_who_closes_waits_for_the_device(queued):
    """Slots and slab are somebody else's memory then."""
    producer, consumer, packing, unpacking = queued
    before = packing.waits, unpacking.waits
    producer.service.close()
    consumer.service.close()
    assert (packing.waits, unpacking.waits) == (before[0] + 1, before[1] + 1)


def test_blocks_that_are_unpacked_stay_when_the_thread_ends_and_the_device_hangs(queued):
    """Its waiting for the device had no end, and nobody heard of it; and what the device writes is
    nobody else's before the process ends."""
    producer, consumer, _, unpacking = queued
    consumer.open(KEY, producer.incarnation)
    producer.hand_over(KEY, 4, [0], consumer.incarnation)
    ready = consumer.wait_for(events.Ready, KEY)
    mover = consumer.service._mover
    inspect = mover.memory.inspect

    def inspected(*args):
        found = inspect(*args)
        assert found.done()
        unpacking.hold.set()  # from what follows it on
        return Moved(found)

    mover.memory.inspect = inspected
    consumer.service.begin_load(KEY, only([4]), 0, ready.num_tokens)
    consumer.until(lambda: mover._unpacks.written())
    assert mover.alive
    consumer.service.close()
    failed = consumer.wait_for(events.LoadFailed, KEY)
    assert not failed.blocks_free
    assert consumer.service.has_pending()


class Moved:
    """A slot that has been looked into."""

    def __init__(self, inspection) -> None:
        self.found = inspection.found

    def done(self) -> bool:
        return True
