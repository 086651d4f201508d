"""A guard of the hand-off taken out of running services: a scenario that holds with it breaks.

The model checker finds the same ones in its worlds (model/README.md); here are real threads,
sockets and memory, so that the guard is seen to be in use, and the tests to see it.
"""

from __future__ import annotations

import tempfile
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.kvtransfer import test_held_copies, test_holes, test_holes_reads
from tests.kvtransfer.builders import Consumer, Producer, make_key
from tests.kvtransfer.held_copies import KEY, Held
from tests.kvtransfer.mapped import test_mapped
from tests.kvtransfer.mapped.worker import Worker
from tests.kvtransfer.model import mutations

from tandem.kvtransfer import events
from tandem.kvtransfer.handoff.exports import ExportTable
from tandem.kvtransfer.handoff.imports import ImportTable
from tandem.kvtransfer.handoff.messages import Final
from tandem.kvtransfer.handoff.pull import SlotRing
from tandem.kvtransfer.mover import consumer as consumer_mover
from tandem.kvtransfer.transports.mapped.transport import _Peer
from tandem.link.session import LinkState, Session, Verdict
from tandem.protocol.errors import FailCause
from tandem.protocol.ids import new_incarnation
from tandem.protocol.kv import FirstToken
from tandem.protocol.link import Header

Workers = Callable[..., Any]


def a_lease_that_ended_before_done(workers: Workers) -> None:
    """All had come through slots when P let go: its word is missing, and nothing is used."""
    key, producer, consumer = KEY, workers(Producer), workers(Consumer)
    consumer.meet(producer)
    consumer.open(key, producer.incarnation)
    assert producer.admit(key, 8, consumer.incarnation) is None
    producer.compute(key, 8, [0, 1])
    consumer.load(key, [4, 5])
    pull = partial(consumer.service._mover.table.pulls.get, key)
    consumer.until(lambda: pull().reached == (8,))
    mover = producer.service._mover
    say, mover.send_message = mover.send_message, lambda peer, message: None  # GONE is late
    producer.service.cancel(key)
    producer.service.finished(key)
    producer.wait_for(events.Released, key)
    mover.send_message = say
    mover.send_message(consumer.incarnation, Final(key, (FirstToken(0, 1),)))
    end = consumer.wait_for((events.LoadFailed, events.Loaded), key, 10.0)
    assert isinstance(end, events.LoadFailed), "it was used"
    assert end.cause is FailCause.GONE


def a_lease_of_a_predecessor(workers: Workers) -> None:
    """What another incarnation says on the link is not heard."""
    producer, consumer = workers(Producer), workers(Consumer)
    consumer.meet(producer)
    key = make_key("stale")
    consumer.open(key, producer.incarnation)
    producer.hand_over(key, 4, [0], consumer.incarnation)
    consumer.wait_for(events.Ready, key)
    (link,) = producer.service._channel._links.values()
    link.session.me = new_incarnation()
    assert consumer.wait_for(events.LoadFailed, key, 10.0).cause is FailCause.PEER


def a_block_of_another(workers: Workers) -> None:
    held = Held(workers, kv_quarantine_seconds=30.0)
    test_held_copies.test_a_block_without_its_tag_is_never_used(
        held, b"another request!", FailCause.IDENTITY, True
    )


def ready_before_the_fence(workers: Workers) -> None:
    producer, consumer = workers(Producer), workers(Consumer)
    consumer.meet(producer)
    test_holes.test_hole_03_nothing_is_announced_before_the_fence((producer, consumer))


def slots_of_reads_that_hang(workers: Workers) -> None:
    test_holes_reads.test_hole_14_hanging_reads_are_capped_and_then_reported(workers)


def memory_under_a_copy(workers: Workers) -> None:
    with tempfile.TemporaryDirectory(prefix="kv-") as name:
        producer, consumer = (Worker(Path(name), fill) for fill in (7, 0))
        consumer.transport.receive(consumer.slots, consumer.blocks)
        try:
            test_mapped.test_memory_stays_mapped_under_a_copy(consumer, producer)
        finally:
            consumer.transport._copier.through = True  # type: ignore[attr-defined]
            consumer.transport.stop()
            producer.transport.stop()


_take = Session.take


def _take_from_anybody(session: Session, header: Header, message: object, now: float) -> Verdict:
    """As if it were the next frame of the peer for this process."""
    source = session.peer if session.state is LinkState.UP else header.source
    return _take(session, Header(source, session.me, session._expected), message, now)


def _unmap_at_once(peer: _Peer) -> None:
    if peer.closed and peer.memory is not None:
        peer.memory.close()
        peer.memory = None


GUARDS: dict[str, tuple[object, str, object, Callable[[Workers], None]]] = {
    "the commit check": (
        ImportTable,
        "machine",
        staticmethod(mutations._commit_at_once),
        a_lease_that_ended_before_done,
    ),
    "the incarnation check": (
        Session,
        "take",
        _take_from_anybody,
        a_lease_of_a_predecessor,
    ),
    "the slot quarantine": (
        SlotRing,
        "quarantine",
        mutations.NoQuarantine.quarantine,
        slots_of_reads_that_hang,
    ),
    "READY's event": (
        ExportTable,
        "machine",
        staticmethod(mutations._announce_at_launch),
        ready_before_the_fence,
    ),
    "the comparison of tags": (
        consumer_mover,
        "fault_of_copy",
        lambda *args: None,
        a_block_of_another,
    ),
    "unmapping behind the last copy": (_Peer, "unmap", _unmap_at_once, memory_under_a_copy),
}


def harm_of(scenario: Callable[[Workers], None], workers: Workers) -> str:
    """The assertion of a scenario that does not hold, with where it stands; empty if all do."""
    try:
        scenario(workers)
    except AssertionError:
        return traceback.format_exc()
    return ""


@pytest.mark.parametrize("guard", GUARDS)
def test_with_its_guard_the_scenario_holds(workers, guard):
    assert harm_of(GUARDS[guard][3], workers) == ""


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("guard", GUARDS)
def test_without_its_guard_the_scenario_breaks(workers, guard, monkeypatch):
    """The scenario sees the harm, and so the guard is in use."""
    where, name, mutant, scenario = GUARDS[guard]
    monkeypatch.setattr(where, name, mutant)
    assert harm_of(scenario, workers)
