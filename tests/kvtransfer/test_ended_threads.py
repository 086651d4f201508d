"""A producer whose transfer thread has died: its engine takes all blocks back, and uses them."""

from __future__ import annotations

import pytest
from tests.kvtransfer.builders import Consumer, Producer, make_config, make_key

from tandem.kvtransfer import events
from tandem.kvtransfer.control.mail import Drop
from tandem.kvtransfer.memory.blocks import CLEARED
from tandem.protocol.errors import FailCause

KEY = make_key("late")


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

    def breaks(*_):
        raise RuntimeError("a fault of the test")

    mover.take = breaks
    producer.service.cancel(make_key("any"))
    producer.wait_for(events.Released, KEY)
    assert all(mover.blocks.tags.read(block) == CLEARED for block in range(64))
    producer.slab.fill_(9)
    if hears:
        failed = consumer.wait_for(events.LoadFailed, KEY)
        assert failed.cause is FailCause.PEER
        consumer.until(
            lambda: "fault of the test" in consumer.service.why_down(producer.incarnation)
        )
        return
    consumer.service.begin_load(KEY, [4, 5], 0, ready.num_tokens)
    end = consumer.wait_for((events.LoadFailed, events.Loaded), KEY)
    assert isinstance(end, events.LoadFailed), "another's KV was used"
