"""Who looks after the control sockets: the transfer thread while it has nothing else to do, the
control thread when that one has been busy for a while."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from tests.kvtransfer.builders import Consumer, Producer, make_config, make_key
from tests.kvtransfer.held_copies import KEY, Held

from tandem.kvtransfer import events
from tandem.kvtransfer.control import client
from tandem.kvtransfer.control.mail import SendMessage
from tandem.kvtransfer.handoff.messages import Final, ProbeReady
from tandem.kvtransfer.mover.mover import SleepState
from tandem.link.wake_queue import WakeQueue


def threads_of(of: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """By which threads a method is called, and with what last."""
    was, seen = getattr(of, name), []

    def noted(*words: Any) -> Any:
        seen.append((threading.current_thread().name, words[-1] if words else None))
        return was(*words)

    monkeypatch.setattr(of, name, noted)
    return seen


def held_up(mover: Any, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Keep the transfer thread in its turn until this is set: the caller's is in its place."""
    go_on, stuck, work = threading.Event(), threading.Event(), mover.work

    def held(now: Any) -> Any:
        stuck.set()
        return work(now) if go_on.wait(60) else []

    monkeypatch.setattr(mover, "work", held)
    mover.inbox.put(SleepState(asleep=False))
    assert stuck.wait(30)
    return go_on


def hand_over(producer: Producer, consumer: Consumer, name: str) -> None:
    """One prompt of three blocks, to its end."""
    key = make_key(name)
    consumer.open(key, producer.incarnation)
    producer.hand_over(key, 12, [0, 1, 2], consumer.incarnation)
    consumer.load(key, [5, 6, 7])
    consumer.until(lambda: consumer.holds(name, 12, [5, 6, 7]))


def test_frames_come_and_go_by_the_transfer_threads_themselves(workers, monkeypatch) -> None:
    """No other thread stands between a socket and who it is for."""
    producer, consumer = workers(Producer, make_config()), workers(Consumer, make_config())
    consumer.meet(producer)
    heard = threads_of(consumer.service._channel, "from_peer", monkeypatch)
    said = threads_of(producer.service._channel, "on_item", monkeypatch)
    found: set[str] = set()
    for turn in range(20):  # a machine that is busy may keep a thread from its turn
        hand_over(producer, consumer, f"turn {turn}")
        words = [name for name, item in heard if isinstance(item.message, Final)]
        found |= {*words, *(name for name, _ in said)}
        if {"kv-transfer-d", "kv-transfer-p"} <= found:
            break
    assert {"kv-transfer-d", "kv-transfer-p"} <= found


@pytest.mark.parametrize("stuck", ["producer", "consumer"])
def test_beats_keep_their_time_while_the_transfer_thread_is_busy(
    workers, monkeypatch, stuck
) -> None:
    """For longer than a peer may be silent; the peer's words wait in the queue as ever."""
    config = make_config(kv_beat_seconds=0.2, kv_beat_timeout=1.0)
    ends = {"producer": workers(Producer, config), "consumer": workers(Consumer, config)}
    ends["consumer"].meet(ends["producer"])
    service = ends[stuck].service
    ticks = threads_of(service._channel, "on_tick", monkeypatch)
    go_on, work = threading.Event(), service._mover.work
    monkeypatch.setattr(service._mover, "work", lambda now: go_on.wait(30) and work(now))
    control = "kv-control-p" if stuck == "producer" else "kv-control-d"
    until = time.monotonic() + 2.5
    ends[stuck].until(lambda: time.monotonic() > until)
    assert any(name == control for name, _ in ticks)
    assert not any(name == service._mover.name for name, _ in ticks[-5:])
    go_on.set()
    for role, end in ends.items():
        assert end.metric("tandem:kv_links_lost_total", role=role) == 0
    hand_over(ends["producer"], ends["consumer"], "after")


def test_beats_keep_their_time_while_bytes_are_on_their_way(workers) -> None:
    """A transfer thread that naps for moments at a time beats all the same, and hears."""
    held = Held(workers, kv_beat_seconds=0.2, kv_beat_timeout=1.0)
    held.copy([0, 1], into=[2, 3])
    until = time.monotonic() + 2.5
    held.consumer.until(lambda: time.monotonic() > until)
    for role, end in (("producer", held.producer), ("consumer", held.consumer)):
        assert end.metric("tandem:kv_links_lost_total", role=role) == 0
    held.transport.hold.clear()
    held.consumer.wait_for(events.Loaded, KEY)


def test_more_frames_than_one_look_takes_are_all_heard(workers, monkeypatch) -> None:
    """A socket says once that frames have come, and a thread takes a bounded number in its turn."""
    config = make_config(kv_beat_seconds=30.0, kv_beat_timeout=60.0)
    producer, consumer = workers(Producer, config), workers(Consumer, config)
    consumer.meet(producer)
    mover, channel = consumer.service._mover, consumer.service._channel
    go_on = held_up(mover, monkeypatch)
    heard = threads_of(channel, "_on_frames", monkeypatch)
    link = producer.service._mover._links[consumer.incarnation]
    frames, taken, mine = 2 * client._BATCH + 76, 0, WakeQueue[object]()
    for turn in range(1, 6):  # frames may be late on a busy machine: then it is tried again
        with channel._lock:  # nobody hears them before all are there
            for _ in range(frames):
                producer.service._channel.post(SendMessage(link, ProbeReady(1 << 20, 1)))
            time.sleep(0.5)
        before = len(heard)
        assert channel.attend(mine, 30.0)
        assert channel.nap(mine, 0.0)
        taken = len(heard) - before
        if taken == frames:
            break
        while len(heard) < turn * frames:
            channel.look()
    assert taken == frames
    go_on.set()


def test_a_read_that_gets_on_goes_first_and_what_came_beside_it_is_heard_next(
    workers, monkeypatch
) -> None:
    """By who only naps, too: a socket that was asked does not stir again for the same frame."""
    config = make_config(kv_beat_seconds=30.0, kv_beat_timeout=60.0)
    producer, consumer = workers(Producer, config), workers(Consumer, config)
    consumer.meet(producer)
    mover, channel = consumer.service._mover, consumer.service._channel
    go_on = held_up(mover, monkeypatch)
    heard = threads_of(channel, "_on_frames", monkeypatch)
    asleep, sleep = threading.Event(), channel._sleep

    def both(others: tuple[int, ...], _seconds: float) -> set[object]:
        asleep.set()
        while not (ready := sleep(others, 30.0)):
            pass
        return {*ready, others[-1]}

    def say() -> None:
        asleep.wait(30)
        link = producer.service._mover._links[consumer.incarnation]
        producer.service._channel.post(SendMessage(link, ProbeReady(1 << 20, 1)))

    monkeypatch.setattr(channel, "_sleep", both)
    threading.Thread(target=say, daemon=True).start()
    mine, read = WakeQueue[object](), WakeQueue[object]()
    assert channel.attend(mine, 30.0, [read.fileno()])
    assert not heard
    assert channel.nap(mine, 0.0)
    assert len(heard) == 1
    go_on.set()


def test_who_waits_at_a_closed_channel_waits_elsewhere(workers) -> None:
    """At once, and for nothing; its own queue is what is left to wait for."""
    consumer = workers(Consumer, make_config())
    channel = consumer.service._channel
    channel.stop()
    assert not channel.attend(WakeQueue(), None)
    channel.look()
    assert channel.problem is None


def test_a_fault_in_the_transfer_threads_turn_ends_the_channel_as_in_its_own(
    workers, monkeypatch
) -> None:
    """The worker says so, and the transfer thread goes on to tell of it."""
    consumer = workers(Consumer, make_config())

    def broken(_now: object) -> None:
        raise ValueError("broken")

    monkeypatch.setattr(consumer.service._channel, "on_due", broken)
    consumer.until(lambda: consumer.service.problem() is not None)
    assert "the KV control thread ended: broken" in str(consumer.service.problem())
    assert consumer.service._mover.alive


def test_who_wakes_for_a_beat_beats_and_sleeps_on(workers, monkeypatch) -> None:
    """It does not look at sockets again and again until the beat's millisecond is over."""
    config = make_config(kv_beat_seconds=0.0503)
    producer, consumer = workers(Producer, config), workers(Consumer, config)
    consumer.meet(producer)
    turns = threads_of(consumer.service._channel, "_turn", monkeypatch)
    ticks = threads_of(consumer.service._channel, "on_tick", monkeypatch)
    consumer.until(lambda: len(ticks) >= 30)
    assert len(turns) < 6 * len(ticks)
