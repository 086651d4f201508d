"""What worked and failed by way: which one is tried again and when, and which links are counted."""

from __future__ import annotations

from collections.abc import Container

import pytest

from tandem.kvtransfer.config import KVTransferConfig
from tandem.kvtransfer.handoff.actions import Millis
from tandem.kvtransfer.mover.linked import MAX_DOUBLINGS, MAX_REMEMBERED_WAYS, Ways
from tandem.kvtransfer.service.parts import make_transports
from tandem.protocol.ids import Incarnation, new_incarnation

PEER, OTHER = Incarnation(b"p" * 16), Incarnation(b"o" * 16)
NEVER = Millis(10**9)


@pytest.fixture
def ways(folder) -> Ways:
    """Two peers have links; ways are shm, shm_agent and tcp."""
    return ways_of(folder, {PEER, OTHER})


def ways_of(folder, linked: Container[Incarnation]) -> Ways:
    config = KVTransferConfig(kv_connector="shm", kv_node_folder=str(folder))
    tcp = make_transports(KVTransferConfig(kv_connector="tcp"), new_incarnation(), "consumer")
    found = {**make_transports(config, new_incarnation(), "consumer"), **tcp}
    for each in found.values():
        each.stop()
    return Ways(1000, found, linked)


def failed(ways: Ways, way: str, now: int = 0, *, met: bool = True, may_come: bool = False) -> int:
    return ways.failed(PEER, way, Millis(now), met=met, may_come=may_come)


def counted(ways: Ways) -> dict[str, int]:
    return {name: count for name, count in ways.counts().items() if count}


def test_pauses_double_and_only_what_worked_is_tried_again(ways: Ways):
    """A way that never worked between two ends stays unused."""
    assert failed(ways, "shm") == 1000
    assert ways.due(NEVER) == []
    assert ways.rest(Millis(0)) is None
    ways.worked(PEER, "tcp")
    assert ways.due(NEVER) == []
    ways.worked(PEER, "shm")
    now, pauses = 0, []
    for _ in range(MAX_DOUBLINGS + 2):
        pauses.append(failed(ways, "shm", now))
        now += pauses[-1]
        assert ways.due(Millis(now - 1)) == []
        assert ways.due(Millis(now)) == [(PEER, "shm")]
        assert ways.rest(Millis(now)) == 0.1  # of a link in use
        ways.tried(PEER, Millis(now))
        assert ways.due(Millis(now)) == []
    assert pauses[:3] == [1000, 2000, 4000]
    assert pauses[-1] == pauses[-2] == 1000 << MAX_DOUBLINGS
    ways.worked(PEER, "shm")
    assert ways.due(NEVER) == []
    assert failed(ways, "shm") == 1000


def test_the_best_way_that_worked_is_the_one_to_go_back_to(ways: Ways):
    """Meanwhile the next way works and may fail."""
    ways.worked(PEER, "shm")
    failed(ways, "shm")
    ways.worked(PEER, "shm_agent")
    assert failed(ways, "shm_agent", 10, may_come=True) == 1000
    ways.worked(PEER, "tcp")
    assert ways.due(Millis(5000)) == [(PEER, "shm")]


def test_a_way_that_may_come_is_tried_though_a_worse_one_worked(ways: Ways):
    """The node's agent starts after the workers."""
    ways.worked(PEER, "tcp")
    failed(ways, "shm_agent", may_come=True, met=False)
    ways.worked(PEER, "tcp")
    assert ways.due(Millis(1000)) == [(PEER, "shm_agent")]


def test_a_way_that_was_not_offered_when_it_was_tried_is_tried_later(ways: Ways):
    """The link was made by a worse way at that moment."""
    ways.worked(PEER, "shm")
    failed(ways, "shm")
    ways.tried(PEER, Millis(1000))
    ways.worked(PEER, "tcp")
    assert ways.due(Millis(1999)) == []
    assert ways.due(Millis(2000)) == [(PEER, "shm")]


def test_a_link_is_counted_until_a_way_as_good_works(ways: Ways):
    """The ways of one machine are equally good."""
    assert ways.counts() == {"shm": 0, "shm_agent": 0}
    failed(ways, "shm_agent")
    ways.worked(PEER, "tcp")
    ways.worked(OTHER, "tcp")
    assert counted(ways) == {"shm_agent": 1}
    ways.worked(PEER, "shm")
    assert counted(ways) == {}


def test_ends_that_never_met_are_not_counted_until_they_have(ways: Ways):
    """Two ends that met once are on one machine."""
    failed(ways, "shm", met=False)
    ways.worked(PEER, "tcp")
    assert counted(ways) == {}
    ways.worked(PEER, "shm")
    failed(ways, "shm", met=False)
    assert counted(ways) == {"shm": 1}


def test_peers_without_a_link_are_not_counted_and_are_forgotten_first(folder):
    """Prefill workers come and go for months."""
    linked = {PEER}
    ways = ways_of(folder, linked)
    ways.worked(PEER, "shm")
    for _ in range(MAX_REMEMBERED_WAYS + 10):
        ways.worked(new_incarnation(), "shm")
    failed(ways, "shm")
    assert counted(ways) == {"shm": 1}
    assert ways.due(Millis(1000)) == [(PEER, "shm")]
    assert len(ways._peers) == MAX_REMEMBERED_WAYS + 1
    linked.clear()
    assert counted(ways) == {}
