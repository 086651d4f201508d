"""Parts that wait to be packed as their hand-off ends: blocks that were given back are not read."""

from __future__ import annotations

from tests.kvtransfer.builders import Consumer, Producer, make_config, make_key

from tandem.kvtransfer import events
from tandem.kvtransfer.handoff import export as p_events
from tandem.protocol.errors import FailCause

KEY, NEXT = make_key("one"), make_key("two")


def test_a_part_that_waits_as_its_hand_off_ends_is_never_packed(workers):
    """The engine may sleep as soon as it has its blocks: where a GPU's lay there is no memory then,
    and whoever reads it fails for good. The slots are free all the same."""
    config = make_config(kv_slots_per_peer=4, kv_credits=4)
    producer, consumer = workers(Producer, config), workers(Consumer, config)
    consumer.meet(producer)
    mover = producer.service._mover
    pack, packed = mover.memory.pack, []

    def packs(kv_cache, block_ids, *args):
        packed.append(tuple(block_ids))
        if len(packed) == 1:
            assert mover._packs.waits, "others wait behind the first"
            mover.inbox.put(p_events.Cancel(KEY))  # before the next turn
        return pack(kv_cache, block_ids, *args)

    mover.memory.pack = packs
    consumer.open(KEY, producer.incarnation)
    producer.hand_over(KEY, 24, list(range(6)), consumer.incarnation)
    consumer.load(KEY, list(range(10, 16)))
    producer.wait_for(events.Released, KEY)
    assert consumer.wait_for(events.LoadFailed, KEY).cause is FailCause.GONE
    producer.until(lambda: mover.table.ring.free == len(mover.table.ring))
    assert len(packed) == 1
    consumer.open(NEXT, producer.incarnation)
    producer.hand_over(NEXT, 8, [6, 7], consumer.incarnation)
    consumer.load(NEXT, [8, 9])
    consumer.wait_for(events.Loaded, NEXT)
    assert consumer.holds("two", 8, [8, 9])
