"""What one incident costs a link that has several ways: one pause, and who is remembered for it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.kvtransfer.builders import make_key
from tests.kvtransfer.test_falls import PEER, alone

from tandem.kvtransfer.config import millis
from tandem.kvtransfer.control.mail import Drop, LinkDown, LinkNumber, LinkUp
from tandem.kvtransfer.handoff import pull
from tandem.kvtransfer.handoff.actions import Millis, Read
from tandem.kvtransfer.handoff.manifest import manifest
from tandem.kvtransfer.handoff.messages import ProbeReady, ProducerCard, Ready
from tandem.kvtransfer.mover.consumer import ConsumerMover
from tandem.kvtransfer.mover.prober import _Probing
from tandem.kvtransfer.mover.reads import Ended
from tandem.kvtransfer.transports.base import Progress
from tandem.protocol.ids import Incarnation

NOW = Millis(1000)


class Posted(list[object]):
    post = list.append

    @property
    def drops(self) -> list[Drop]:
        return [each for each in self if isinstance(each, Drop)]


@pytest.fixture
def mover(folder: Path) -> Iterator[ConsumerMover]:
    """A consumer's transfer thread that nobody runs, with a link by shm."""
    made = alone(folder)
    made.control = Posted()  # type: ignore[assignment]
    _link(made, PEER, 1)
    yield made
    made.stop()


def _link(mover: ConsumerMover, peer: Incarnation, number: int) -> None:
    mover._links[peer] = LinkNumber(number)
    mover._welcomes[peer] = SimpleNamespace(connector="shm", num_blocks=64)  # type: ignore[assignment]
    mover.ways.worked(peer, "shm")
    mover.table.link_up(peer)


def _posted(mover: ConsumerMover) -> list[Drop]:
    assert isinstance(mover.control, Posted)
    return mover.control.drops


def _read_under_way(mover: ConsumerMover, number: int) -> Read:
    key, reads = make_key(f"k{number}"), []
    mover.start_read = lambda read, now, check=None: reads.append(read)  # type: ignore[assignment]
    ready = Ready(key, 4, 4, manifest(mover.table.policy.groups, 4), ((number,),))
    for each in (
        pull.Opened(key, PEER, None, link_up=True, direct=True),
        pull.PeerMessage(key, PEER, ready),
        pull.Load(key, ((20 + number,),), 0, 4),
    ):
        mover._carry_out(mover.table.apply(each, NOW), NOW)
    (read,) = reads
    return read


def test_reads_that_fail_together_are_one_incident(mover, monkeypatch):
    """The agent restarts under load: the pause doubled with each copy that was under way, so that
    six kept the link on the next way for 16 minutes, though its peer was told of the first."""
    reads = [_read_under_way(mover, number) for number in range(6)]
    ended = [Ended(each, Progress.FAILED, time.perf_counter()) for each in reads]
    monkeypatch.setattr(mover.reads, "ended", lambda: ended)
    mover._poll_reads(NOW)
    pause = millis(mover.config.kv_quarantine_seconds)
    assert [(each.without, each.without_ms) for each in _posted(mover)] == [("shm", pause)]
    assert mover.ways.due(Millis(NOW + pause)) == [(PEER, "shm")]


def test_what_fails_on_a_link_that_was_given_up_says_nothing_more(mover):
    """Until its end is heard of; what fails on the next counts again."""
    mover.drop(PEER, "quarantined", 30_000)
    mover.fall(PEER, "a read failed", NOW)
    assert len(_posted(mover)) == 1
    assert mover.ways.due(Millis(10**9)) == []
    mover.take(LinkDown(PEER, LinkNumber(1), "dropped"), NOW)
    assert not mover._given_up
    _link(mover, PEER, 2)
    mover.fall(PEER, "a read failed", NOW)
    assert [each.link for each in _posted(mover)] == [1, 2]
    assert mover.ways.due(Millis(10**9)) == [(PEER, "shm")]


def test_a_link_that_is_refused_ends_the_probe_of_the_one_before(mover):
    """A peer that is called by two addresses: its word of that probe, on a link by what this worker
    does not have, ended the transfer thread."""
    mover.prober._probing[PEER] = _Probing(1, NOW)
    card = ProducerCard("unheard-of", b"", 1, 1, 1)
    mover.take(LinkUp(PEER, LinkNumber(2), "unheard-of", "host", card), NOW)
    mover.prober.ready(PEER, ProbeReady(1, 4096), NOW)
    mover.prober.work(Millis(NOW + 1))
    assert [each.link for each in _posted(mover)] == [2]


def test_no_hand_off_begins_on_a_link_that_is_made_anew_by_choice(mover):
    """What was opened before the end of the link was heard of failed with it."""
    mover.book.mark(PEER, up=True, transport="tcp")
    mover.ways.failed(PEER, "shm", NOW, met=True, may_come=False)
    pause = millis(mover.config.kv_quarantine_seconds)
    mover._come_back(Millis(NOW + pause))
    assert [(each.without, each.without_ms) for each in _posted(mover)] == [("shm", 0)]
    assert not mover.book.is_up(PEER)
    assert mover.book.why_down(PEER) == "trying shm again"
    mover.usable(PEER, 1e9)
    assert not mover.book.is_up(PEER), "a probe that was under way passed meanwhile"
