"""Reads of extents, whatever transport brings them."""

from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from tests.kvtransfer.memory_transport import MemoryTransport
from tests.waiting import wait_for

from tandem.kvtransfer.memory.blocks import CLEARED, Blocks, BlockTags
from tandem.kvtransfer.memory.slots import SlotMemory
from tandem.kvtransfer.mover.reads import slot_extent
from tandem.kvtransfer.transports.base import (
    BlockExtents,
    Extent,
    Progress,
    Region,
    Ticket,
    Traits,
    Transport,
)
from tandem.kvtransfer.transports.nixl import NixlTransport
from tandem.kvtransfer.transports.tcp import TcpTransport
from tandem.protocol.ids import Incarnation, RequestKey, new_incarnation

SLOTS, SIZE = 4, 4096


class Ends(NamedTuple):
    """P and D of one transport, and their slots."""

    producer: Transport
    consumer: Transport
    theirs: SlotMemory
    mine: SlotMemory
    peer: Incarnation

    def outcome(self, ticket: Ticket) -> Progress:

        def ended() -> Progress | None:
            self.producer.advance()
            self.consumer.advance()
            progress = self.consumer.poll(ticket)
            return None if progress is Progress.PENDING else progress

        return wait_for(ended, every=0.001)


def made(connector: str, role: str, incarnation: Incarnation) -> Transport:
    if connector == "nixl":
        return NixlTransport(incarnation, role, loopback=True)
    if connector == "tcp":
        return TcpTransport(incarnation, host="127.0.0.1")
    return MemoryTransport()


@pytest.fixture(params=["memory", "tcp", "nixl"])
def ends(request) -> Iterator[Ends]:
    """Linked; P's slot n is full of n + 1."""
    peer = new_incarnation()
    producer = made(request.param, "producer", peer)
    consumer = made(request.param, "consumer", new_incarnation())
    theirs, mine = SlotMemory(SLOTS, SIZE), SlotMemory(SLOTS, SIZE)
    mine.rows.zero_()
    for slot in range(SLOTS):
        theirs.write(slot, bytes([slot + 1]) * SIZE)
    consumer.receive(mine)
    consumer.connect(peer, "127.0.0.1", producer.serve(theirs))
    yield Ends(producer, consumer, theirs, mine, peer)
    consumer.stop()
    producer.stop()


def extent(slot: int, remote_slot: int, nbytes: int) -> Extent:
    return slot_extent(slot, remote_slot, nbytes, slot_bytes=SIZE, remote_slot_bytes=SIZE)


def test_one_read_brings_several_extents_and_ends_when_all_are_here(ends):
    """Each lands where it belongs, and nothing else is written."""
    wanted = [extent(0, 2, 100), extent(2, 3, SIZE), extent(3, 0, 1)]
    assert ends.outcome(ends.consumer.read(ends.peer, wanted)) is Progress.DONE
    assert ends.mine.read(0, 101) == b"\3" * 100 + b"\0"
    assert ends.mine.read(1, SIZE) == b"\0" * SIZE
    assert ends.mine.read(2, SIZE) == b"\4" * SIZE
    assert ends.mine.read(3, 2) == b"\1\0"
    assert ends.outcome(ends.consumer.read(ends.peer, [extent(1, 1, SIZE)])) is Progress.DONE
    assert ends.mine.read(1, SIZE) == b"\2" * SIZE


def test_an_extent_that_the_peer_does_not_have_fails_its_whole_read(ends):
    wanted = [extent(0, 0, SIZE), extent(1, SLOTS, SIZE)]
    assert ends.outcome(ends.consumer.read(ends.peer, wanted)) is Progress.FAILED


def test_copies_reach_only_blocks_that_the_peer_has():
    """Whole ones, or their start; the others' bytes are not touched, and a tag comes with each."""
    slots, size, peer = SlotMemory(1, SIZE), 64, new_incarnation()
    theirs, mine = (Blocks(torch.zeros(4, size, dtype=torch.uint8), BlockTags(4)) for _ in "pd")
    producer, consumer = MemoryTransport(direct=True), MemoryTransport(direct=True)
    theirs.kv_cache.add_(torch.arange(1, 5, dtype=torch.uint8)[:, None])
    theirs.tags.set(RequestKey(b"R" * 16, "a", 0), 3, b"t" * 16)
    consumer.receive(slots, mine)
    consumer.connect(peer, "", producer.serve(slots, theirs))
    ticket = consumer.read(peer, BlockExtents([0, 2], [3, 1], size))
    assert consumer.poll(ticket) is Progress.DONE
    assert consumer.tags_of(ticket) == b"t" * 16 + CLEARED
    assert mine.kv_cache[:, 0].tolist() == [4, 0, 2, 0]
    for wrong in ([4], [-1]):
        ticket = consumer.read(peer, BlockExtents([1], wrong, size))
        assert consumer.poll(ticket) is Progress.FAILED
    assert mine.kv_cache[:, 0].tolist() == [4, 0, 2, 0]
    producer.stop()
    assert consumer.poll(consumer.read(peer, BlockExtents([1], [0], size))) is Progress.FAILED


def test_only_fenced_copies_may_write_live_blocks():
    """A transport that cannot see the end of its copies is not made."""
    with pytest.raises(ValueError, match="wild: only fenced"):
        Traits(name="wild", needs_advance=False, lands_in=Region.BLOCKS)
