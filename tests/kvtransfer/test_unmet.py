"""Prefill workers that cannot be met where they map, and later can: a node's pods begin in any
order, and who makes their folder theirs may be the last."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.kvtransfer.builders import Producer, make_config, make_key
from tests.kvtransfer.test_falls import Pair

from tandem.kvtransfer import events
from tandem.kvtransfer.control.channel import now_ms
from tandem.kvtransfer.errors import TransportError
from tandem.kvtransfer.handoff.actions import Millis
from tandem.kvtransfer.transports.mapped import giving


@pytest.fixture
def taken(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(giving, "socket_name", lambda _: "dead.sock")
    made = folder / "dead.new"
    made.mkdir()
    return made


def test_a_producer_that_can_be_met_later_is_gone_back_to(workers, folder, taken):
    """It said until it was restarted that it cannot be met. No hand-off is cut off for it."""
    pair = Pair(workers, folder, folder, kv_node_copy="direct", kv_quarantine_seconds=60.0)
    producer, consumer = pair.producer, pair.consumer
    peer, mover = producer.incarnation, consumer.service._mover
    assert pair.transport == list(mover.parts.transports)[1]
    assert consumer.metric("tandem:kv_links_fallen", connector="shm") == 1
    pair.hand_over("meanwhile")
    across = make_key("across")
    consumer.open(across, peer)
    assert producer.admit(across, 8, consumer.incarnation) is None
    consumer.until(lambda: mover.table.is_pulling(peer))
    taken.rmdir()
    shm = producer.service._mover.parts.transports["shm"]
    producer.until(lambda: shm.unmet is None)
    mover.ways._peers[peer].due = now_ms()
    consumer.service.cancel(make_key("any"))  # which wakes the thread
    producer.compute(across, 8, [0, 1])
    producer.end(across)
    consumer.load(across, [4, 5])
    consumer.wait_for(events.Loaded, across)
    consumer.until(lambda: pair.transport == "shm")
    assert consumer.metric("tandem:kv_links_fallen", connector="shm") == 0
    pair.hand_over("again")


def test_a_producer_whose_only_way_cannot_be_met_does_not_begin(workers, folder, taken):
    """Nobody would ever take KV from it, whoever hoped for better."""
    config = make_config(kv_connector="shm", kv_node_folder=str(folder), kv_node_copy="direct")
    with pytest.raises(TransportError, match="no socket"):
        workers(Producer, config)


def test_ends_in_folders_of_their_own_are_not_tried_again(workers, folder):
    """Two machines: nobody misses that one maps what the other has, and nobody is told."""
    for name in ("one", "two"):
        (folder / name).mkdir()
    pair = Pair(workers, folder / "one", folder / "two", kv_quarantine_seconds=0.2)
    assert pair.transport in ("nixl", "tcp")
    assert pair.consumer.metric("tandem:kv_links_fallen", connector="shm") == 0
    assert pair.consumer.service._mover.ways.due(Millis(10**15)) == []
