"""What happens while KV is copied from block to block: wrong tags, and ends of all kinds."""

from typing import Any

import msgspec
import pytest
from tests.kvtransfer.builders import Producer, make_key
from tests.kvtransfer.held_copies import KEY, OTHER, Held
from tests.own_ports import own_ports

from tandem.kvtransfer import events
from tandem.kvtransfer.control.channel import now_ms
from tandem.kvtransfer.handoff.messages import Message, Ready
from tandem.kvtransfer.memory.blocks import CLEARED, tag_of
from tandem.protocol.errors import FailCause
from tandem.protocol.ids import Incarnation, RequestKey


@pytest.fixture
def held(workers) -> Held:
    """Copies that wait, and a rest of links that is not over before it is seen."""
    return Held(workers, kv_quarantine_seconds=30.0)


@pytest.mark.parametrize(
    ("tag", "cause", "rests"),
    [(b"another request!", FailCause.IDENTITY, True), (CLEARED, FailCause.GONE, False)],
    ids=["another's", "cleared"],
)
def test_a_block_without_its_tag_is_never_used(held, tag, cause, rests):
    """One that is another's by now speaks against the link; a lease that ended does not."""
    held.copy([0, 1, 2], [4, 5, 6])
    held.tags._write(1, tag)
    held.transport.hold.clear()
    end = held.consumer.wait_for((events.LoadFailed, events.Loaded), KEY)
    assert isinstance(end, events.LoadFailed), "the block was used"
    assert end.cause is cause
    producer = held.producer.incarnation
    if rests:
        held.consumer.until(lambda: not held.consumer.service.peer_up(producer))
        assert "has the tag of another" in held.consumer.service.why_down(producer)
    else:
        assert held.consumer.service.peer_up(producer)
    held.tags._write(1, CLEARED)
    held.nothing_is_held()


def test_a_lease_that_ended_and_whose_blocks_are_anothers_speaks_against_nobody(held, monkeypatch):
    """P's GONE may come after the copy; a link that rests for it would cost all other requests."""
    held.copy([0, 1], [4, 5])
    mover, consumer = held.producer.service._mover, held.consumer.service
    late: list[tuple[Incarnation, Message]] = []
    monkeypatch.setattr(mover, "send_message", lambda peer, said: late.append((peer, said)))
    held.producer.service.cancel(KEY)
    held.producer.wait_for(events.Released, KEY)
    held.producer.hand_over(OTHER, 8, [0, 1], held.consumer.incarnation)
    held.producer.until(lambda: held.tags.read(1) == tag_of(OTHER, 0, 1, ()))
    held.transport.hold.clear()
    held.consumer.until(lambda: consumer._mover.table.pulls[KEY].uncertain)
    assert not any(isinstance(each, events.LoadFailed) for each in held.consumer.seen)
    monkeypatch.undo()
    for peer, said in late:
        mover.send_message(peer, said)
    assert held.consumer.wait_for(events.LoadFailed, KEY).cause is FailCause.GONE
    assert consumer.peer_up(held.producer.incarnation)
    held.consumer.open(OTHER, held.producer.incarnation)
    held.consumer.load(OTHER, [4, 5])
    held.consumer.wait_for(events.Loaded, OTHER)
    assert held.consumer.holds("two", 8, [4, 5])
    held.nothing_is_held()


def test_blocks_come_back_only_when_the_copy_into_them_has_ended(held):
    """A request that is cancelled keeps its blocks until nothing can be written there any more."""
    held.copy([0, 1], [4, 5])
    held.consumer.service.cancel(KEY)
    assert not held.consumer.wait_for(events.Cancelled, KEY).blocks_free
    held.producer.wait_for(events.Released, KEY)
    assert not any(isinstance(each, events.Released) for each in held.consumer.seen)
    assert held.consumer.service.has_pending()
    held.transport.hold.clear()
    held.consumer.wait_for(events.Released, KEY)
    held.nothing_is_held()


def test_blocks_come_back_though_the_link_is_lost_while_they_are_copied(held):
    """The copy then fails, which is an end, too."""
    held.copy([0, 1], [4, 5])
    held.consumer.service.set_peers([])
    failed = held.consumer.wait_for(events.LoadFailed, KEY)
    assert (failed.cause, failed.blocks_free) == (FailCause.PEER, False)
    held.transport.hold.clear()
    held.consumer.wait_for(events.Released, KEY)
    held.nothing_is_held()


def test_ready_names_blocks_that_exist(held):
    """A block out of P's slab is an identity fault, not a copy."""
    say = held.producer.service._mover.send_message

    def wild(peer, message):
        if isinstance(message, Ready) and message.upto:
            message = msgspec.structs.replace(message, blocks=((64,),))
        say(peer, message)

    held.producer.service._mover.send_message = wild
    held.consumer.open(KEY, held.producer.incarnation)
    held.producer.hand_over(KEY, 4, [0], held.consumer.incarnation)
    held.consumer.load(KEY, [1])
    failed = held.consumer.wait_for(events.LoadFailed, KEY)
    assert failed.cause is FailCause.IDENTITY
    assert "block 64 of 64" in failed.message
    assert not held.transport._reads


def lapse(table: Any, keys: dict[RequestKey, Any]) -> None:
    """The time that KEY has is over: whatever the machine took to come so far."""
    keys[KEY] = msgspec.structs.replace(keys[KEY], deadline=now_ms())
    table._timers.arm(KEY, keys[KEY].deadline)


def test_a_lease_that_lapses_while_it_is_copied_is_let_go_of(workers):
    """P's blocks are free at its time, whatever D copies; D's are when the copy has ended."""
    held = Held(workers, kv_lease_seconds=60.0)
    held.copy([0, 1], [4, 5])
    table = held.producer.service._mover.table
    lapse(table, table.exports)
    held.producer.wait_for(events.Released, KEY)
    assert held.tags.read(0) == CLEARED
    failed = held.consumer.wait_for(events.LoadFailed, KEY)
    assert (failed.cause, failed.blocks_free) == (FailCause.GONE, False)
    held.transport.hold.clear()
    held.consumer.wait_for(events.Released, KEY)
    assert held.consumer.service.peer_up(held.producer.incarnation)
    held.nothing_is_held()


def test_a_copy_that_hangs_fails_its_request_alone_and_keeps_its_blocks(workers):
    """D's own time for it is over; the link goes on, and so does the next hand-off into the blocks
    once they are free."""
    held = Held(workers, kv_transfer_seconds=60.0)
    held.copy([0, 1], [4, 5])
    table = held.consumer.service._mover.table
    lapse(table, table.pulls)
    failed = held.consumer.wait_for(events.LoadFailed, KEY)
    assert (failed.cause, failed.blocks_free) == (FailCause.TIMEOUT, False)
    held.producer.wait_for(events.Released, KEY)
    held.transport.hold.clear()
    held.consumer.wait_for(events.Released, KEY)
    held.consumer.open(OTHER, held.producer.incarnation)
    held.producer.hand_over(OTHER, 8, [0, 1], held.consumer.incarnation)
    held.consumer.load(OTHER, [5, 4])
    held.consumer.wait_for(events.Loaded, OTHER)
    assert held.consumer.holds("two", 8, [5, 4])
    held.nothing_is_held()


def test_a_worker_whose_copies_hang_is_not_ready(workers, monkeypatch):
    """Each next request lost its blocks to a copy behind the one that hangs; nobody was told."""
    monkeypatch.setattr("tandem.kvtransfer.mover.prober.AGAIN_MS", ())  # patterns hang, too
    held = Held(workers, kv_transfer_seconds=0.2)
    service = held.consumer.service
    assert service.problem() is None
    held.copy([0, 1], [4, 5])
    assert held.consumer.wait_for(events.LoadFailed, KEY).cause is FailCause.TIMEOUT
    assert held.consumer.until(service.problem) == "1 copies into blocks hang"
    assert service.peer_up(held.producer.incarnation), "the links are as good as they were"
    held.transport.hold.clear()
    held.consumer.wait_for(events.Released, KEY)
    assert service.problem() is None
    held.nothing_is_held()


def test_a_producer_that_restarts_in_mid_copy_is_another(workers):
    """Nothing of the old one's is used, and a copy of its memory is never made any more."""
    # A consumer has no such port, and between the two producers nobody takes it.
    held = Held(workers, kv_control_port=own_ports(1)[0])
    held.copy([0, 1], [4, 5])
    held.producer.service.close()
    successor = workers(Producer, held.producer.config)
    assert successor.service.control == held.producer.service.control
    failed = held.consumer.wait_for(events.LoadFailed, KEY)
    assert (failed.cause, failed.blocks_free) == (FailCause.PEER, False)
    held.transport.hold.clear()
    held.consumer.wait_for(events.Released, KEY)
    assert not held.consumer.kv_cache[[4, 5]].any()
    held.consumer.until(lambda: held.consumer.service.peer_up(successor.incarnation))
    again = make_key("one", attempt=1)
    held.consumer.open(again, successor.incarnation)
    successor.hand_over(again, 8, [2, 3], held.consumer.incarnation)
    held.consumer.load(again, [4, 5])
    held.consumer.wait_for(events.Loaded, again)
    assert held.consumer.holds("one", 8, [4, 5])


def test_a_consumer_that_ends_in_mid_copy_writes_no_more_and_costs_its_producer_nothing(held):
    """Its memory is somebody else's after ``close``; P's blocks are free with the link."""
    held.copy([0, 1], [4, 5])
    held.consumer.service.close()
    held.transport.hold.clear()
    held.producer.wait_for(events.Released, KEY)
    held.producer.until(lambda: not held.producer.service.has_pending())
    assert all(held.tags.read(block) == CLEARED for block in range(64))
    assert not held.consumer.kv_cache.any()
