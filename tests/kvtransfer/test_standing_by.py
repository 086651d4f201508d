"""Shortly before the last of a prompt's KV is written both ends, and what lies between, wake."""

from __future__ import annotations

import time

import pytest
from tests.kvtransfer.builders import Consumer, Producer, Switch, make_config, make_key, only

from tandem.kvtransfer import events
from tandem.kvtransfer.handoff.messages import Ready
from tandem.kvtransfer.mover import mover as mover_module

KEY = make_key("soon")


@pytest.fixture(params=["memory_blocks", "tcp"])
def begun(request, workers, monkeypatch):
    """A pair, for which P has begun to compute a prompt and D has blocks; what D hears of it."""
    config = make_config(kv_connector=request.param)
    producer, consumer = workers(Producer, config), workers(Consumer, config)
    consumer.meet(producer)
    mover, heard = consumer.service._mover, []
    take = mover._take_message

    def noted(item, now):
        if isinstance(item.message, Ready):
            heard.append(item.message.upto)
        return take(item, now)

    monkeypatch.setattr(mover, "_take_message", noted)
    assert producer.admit(KEY, 16, consumer.incarnation) is None
    consumer.open(KEY, producer.incarnation)
    producer.service.started(KEY)
    consumer.load(KEY, [4, 5, 6, 7])
    return producer, consumer, heard, request.param == "memory_blocks"


def test_ready_is_said_again_before_the_last_kv_is_written(begun) -> None:
    """Where D copies blocks: it is awake when the news comes. Nothing is announced before its
    fence, and the prompt is handed over as ever."""
    producer, consumer, heard, direct = begun
    first, last = Switch(), Switch()
    for upto, blocks, fence in ((8, [0, 1], first), (16, [0, 1, 2, 3], last)):
        producer.service.computed(KEY, only(blocks), upto, fence)
    movers = producer.service._mover, consumer.service._mover
    if direct:
        consumer.until(lambda: heard == [0, 0])
        assert all(each._awake_until > 0 for each in movers)
    first.is_done = True
    consumer.until(lambda: heard[-1] == 8)
    assert not any(isinstance(each, events.Loaded) for each in consumer.seen)
    last.is_done = True
    producer.end(KEY)
    consumer.wait_for(events.Loaded, KEY)
    assert heard == ([0, 0, 8, 16] if direct else [0, 8, 16])
    if not direct:
        assert not any(each._awake_until for each in movers)


def test_what_is_written_already_is_said_once(begun) -> None:
    """On a CPU a step is over when it is launched."""
    producer, consumer, heard, _ = begun
    producer.service.computed(KEY, only([0, 1, 2, 3]), 16, Switch(done=True))
    producer.end(KEY)
    consumer.wait_for(events.Loaded, KEY)
    assert heard == [0, 16]


def test_who_stands_by_naps_and_sleeps_again(begun, monkeypatch) -> None:
    """What does not come within moments is slept for as ever. Moments are long here, since a thread
    may have no turn in those that were meant."""
    monkeypatch.setattr(mover_module, "AWAKE_SECONDS", 0.3)
    producer, consumer, heard, direct = begun
    pauses: list[float | None] = []
    mover = consumer.service._mover
    pause = mover.pause

    def noted(seconds):
        pauses.append(seconds)
        pause(seconds)

    mover.pause = noted
    producer.service.computed(KEY, only([0, 1, 2, 3]), 16, Switch())
    if direct:
        consumer.until(lambda: heard == [0, 0])
        consumer.until(lambda: time.monotonic() > mover._awake_until)
        assert any(each is not None and each <= 5e-5 for each in pauses)
    pauses.clear()
    end = time.monotonic() + 0.5
    consumer.until(lambda: time.monotonic() > end)
    assert all(each is None or each > 1e-3 for each in pauses[1:])
