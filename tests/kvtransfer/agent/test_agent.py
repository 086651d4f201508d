"""Reads by a node's agent: what comes, what may not, and what is let go of when one end is lost."""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.kvtransfer.agent.agents import AgentWorker, Held, Running
from tests.kvtransfer.mapped.test_mapped import block, ended, until
from tests.kvtransfer.mapped.worker import BLOCKS, BYTES, KEY, TAG

from tandem.kvtransfer.errors import NoAgentYet, TransportError
from tandem.kvtransfer.memory.blocks import CLEARED
from tandem.kvtransfer.transports.agent import landing, wire
from tandem.kvtransfer.transports.agent import transport as agent_transport
from tandem.kvtransfer.transports.agent.line import Line
from tandem.kvtransfer.transports.base import Check, Extent, Place, Progress, Region
from tandem.kvtransfer.transports.mapped.wire import place_of
from tandem.protocol.ids import Incarnation, new_incarnation


def linked(consumer: AgentWorker, producer: AgentWorker) -> Incarnation:
    """The consumer knows the producer's card, and the agent both."""
    consumer.transport.connect(producer.incarnation, "127.0.0.1", producer.serve())
    return producer.incarnation


def read(consumer: AgentWorker, peer: Incarnation, *extents: Extent) -> Progress:
    return ended(consumer.transport, consumer.transport.read(peer, extents))


def moved(consumer: AgentWorker) -> bool:
    """True, and the transport has got on."""
    consumer.transport.advance()
    return True


def begun(consumer: AgentWorker, held: Held, number: int) -> None:
    """Wait until the agent has begun so many copies."""
    until(lambda: moved(consumer) and held.begun == number)


def test_blocks_come_through_landing_slots_with_their_tags(
    running: Running, consumer: AgentWorker, producer: AgentWorker
) -> None:
    """More blocks than the slots hold, scattered at both ends, and each one's tag."""
    peer = linked(consumer, producer)
    producer.kv_cache[:] = torch.arange(BLOCKS, dtype=torch.uint8)[:, None] + 1
    producer.blocks.tags.set(KEY, 4, TAG)
    pairs = [(0, 5), (7, 4), (1, 3), (2, 0), (6, 6)]
    ticket = consumer.transport.read(peer, [block(*each) for each in pairs])
    assert ended(consumer.transport, ticket) is Progress.DONE
    assert consumer.transport.tags_of(ticket) == b"".join([CLEARED, TAG, CLEARED, CLEARED, CLEARED])
    assert not consumer.transport.tags_of(ticket)
    assert consumer.kv_cache[:, 0].tolist() == [6, 4, 1, 0, 0, 0, 7, 5]
    assert running.agent.counts["bytes"] == len(pairs) * BYTES


def test_a_pattern_comes_in_as_many_pieces_as_it_takes(
    running: Running, consumer: AgentWorker, producer: AgentWorker
) -> None:
    """It is longer than a landing slot, and carries no tags."""
    peer = linked(consumer, producer)
    producer.slots.rows.view(-1)[:] = torch.arange(4 * BYTES).to(torch.uint8)
    whole = Extent(Place(Region.SLOTS, 0), Place(Region.SLOTS, 0), 4 * BYTES, Check.PATTERN)
    assert read(consumer, peer, whole) is Progress.DONE
    assert torch.equal(consumer.slots.rows, producer.slots.rows)
    assert not consumer.transport._tags, "nobody takes them"


@pytest.mark.parametrize(
    "extent",
    [
        block(0, BLOCKS),
        block(0, 0, nbytes=BLOCKS * BYTES + 1),
        block(0, -1),
        block(0, 1, shift=1),
        block(BLOCKS, 0),
        block(-1, 0),
        Extent(Place(Region.SLOTS, 0), Place(Region.SLOTS, 4 * BYTES), 1, Check.PATTERN),
        Extent(Place(Region.SLOTS, 4 * BYTES), Place(Region.SLOTS, 0), 1, Check.PATTERN),
    ],
)
def test_what_lies_outside_is_not_touched(
    running: Running, consumer: AgentWorker, producer: AgentWorker, extent: Extent
) -> None:
    """An extent beyond either end's memory, or that is no whole block, fails its read; no block but
    those of the read is written; the link goes on."""
    peer = linked(consumer, producer)
    assert read(consumer, peer, block(1, 1), extent) is Progress.FAILED
    assert not consumer.kv_cache[[0, *range(2, BLOCKS)]].any()
    assert not consumer.slots.rows.any()
    assert read(consumer, peer, block(0, 0)) is Progress.DONE


def test_a_tag_that_went_and_came_back_during_the_copy_counts_as_cleared(
    folder: Path, monkeypatch: pytest.MonkeyPatch, consumer: AgentWorker, producer: AgentWorker
) -> None:
    """Between the two the block was somebody else's: the same tag says nothing of the bytes."""
    held = Held(monkeypatch)
    running = Running(folder)
    producer.blocks.tags.set(KEY, 3, TAG)
    peer = linked(consumer, producer)
    ticket = consumer.transport.read(peer, [block(0, 3)])
    begun(consumer, held, 1)
    producer.blocks.tags.clear(KEY)
    producer.blocks.tags.set(KEY, 3, TAG)
    held.through = True
    assert ended(consumer.transport, ticket) is Progress.DONE
    assert consumer.transport.tags_of(ticket) == CLEARED
    ticket = consumer.transport.read(peer, [block(0, 3)])
    assert ended(consumer.transport, ticket) is Progress.DONE
    assert consumer.transport.tags_of(ticket) == TAG
    running.stop()


def test_a_slot_that_nobody_wants_is_not_used_before_its_copy_has_ended(
    folder: Path, monkeypatch: pytest.MonkeyPatch, producer: AgentWorker
) -> None:
    """The link is lost while the agent copies: the read fails at once, its blocks are free, and
    what lands late lies in a slot of its own."""
    held = Held(monkeypatch)
    running, consumer = Running(folder), AgentWorker(folder, 0, slots=2, per_peer=2)
    consumer.transport.receive(consumer.slots, consumer.blocks)
    peer = linked(consumer, producer)
    ticket = consumer.transport.read(peer, [block(0, 0)])
    begun(consumer, held, 1)
    consumer.transport.close(peer)
    assert consumer.transport.poll(ticket) is Progress.FAILED
    other = AgentWorker(folder, 9)
    peer = linked(consumer, other)
    late = consumer.transport.read(peer, [block(4, 0), block(5, 0), block(6, 0)])
    begun(consumer, held, 2)  # the second slot; the third piece waits
    assert consumer.transport._landing.ring.quarantined == 1
    held.through = True
    assert ended(consumer.transport, late) is Progress.DONE
    assert consumer.kv_cache[:, 0].tolist() == [0, 0, 0, 0, 9, 9, 9, 0]
    until(lambda: moved(consumer) and consumer.transport._landing.ring.free == 2)
    other.transport.stop()
    consumer.transport.stop()
    running.stop()


def test_an_agent_that_ends_fails_what_it_has_not_answered(
    folder: Path, monkeypatch: pytest.MonkeyPatch, consumer: AgentWorker, producer: AgentWorker
) -> None:
    """And the next one serves the same ends by the same card, into slots in new memory: what the
    first has begun can land in none of them."""
    held = Held(monkeypatch)
    first = Running(folder)
    peer = linked(consumer, producer)
    ticket = consumer.transport.read(peer, [block(0, 0), block(1, 1), block(2, 2)])
    begun(consumer, held, 2)
    old = consumer.transport._asker.memory
    first.stop()
    assert ended(consumer.transport, ticket) is Progress.FAILED
    assert not consumer.kv_cache.any()
    held.through = True
    second = Running(folder)
    assert read(consumer, peer, block(0, 0)) is Progress.DONE
    assert consumer.transport._asker.memory is not old
    assert consumer.kv_cache[0].all()
    second.stop()
    third = Running(folder)  # nothing was asked of the second as it ended
    assert read(consumer, peer, block(1, 1)) is Progress.DONE
    third.stop()


def test_an_agent_that_hangs_is_given_up(
    folder: Path, monkeypatch: pytest.MonkeyPatch, consumer: AgentWorker, producer: AgentWorker
) -> None:
    """No answer for a while: the read fails, so that the hand-off can go another way; and while
    the agent does not greet, no more memory is made for it."""
    held = Held(monkeypatch)
    running = Running(folder)
    peer = linked(consumer, producer)
    ticket = consumer.transport.read(peer, [block(0, 0)])
    begun(consumer, held, 1)
    with monkeypatch.context() as impatient:  # one that only was slow to begin does not hang
        impatient.setattr(landing, "AGENT_SECONDS", 0.3)
        assert ended(consumer.transport, ticket) is Progress.FAILED
    assert held.begun == 1
    assert consumer.transport._asker.memory is None
    held.through = True
    assert read(consumer, peer, block(0, 0)) is Progress.DONE
    running.stop()


def test_a_producer_that_registers_late_is_waited_for(
    running: Running,
    folder: Path,
    consumer: AgentWorker,
    producer: AgentWorker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its card came first; one that never comes is refused."""
    card = producer.serve()
    producer.transport.stop()
    until(lambda: running.agent._producers.known == {})
    peer = producer.incarnation
    consumer.transport.connect(peer, "", card)
    ticket = consumer.transport.read(peer, [block(0, 0)])
    until(lambda: moved(consumer) and running.agent.counts["refused: unknown"] > 1)
    consumer.transport._secrets[peer] = wire.decode_card(producer.serve()).secret
    assert ended(consumer.transport, ticket) is Progress.DONE
    monkeypatch.setattr(agent_transport, "UNKNOWN_SECONDS", 0.2)
    producer.transport.stop()
    until(lambda: running.agent._producers.known == {})
    assert read(consumer, peer, block(0, 0)) is Progress.FAILED


def test_who_is_elsewhere_or_alone_is_told_at_once(
    folder: Path, consumer: AgentWorker, tmp_path: Path
) -> None:
    """Another folder is another machine, as far as one can see; no agent is one that may come."""
    elsewhere = AgentWorker(tmp_path, 7)
    card = elsewhere.transport.serve(elsewhere.slots, elsewhere.blocks)
    with pytest.raises(TransportError, match="uses another agent"):
        consumer.transport.connect(elsewhere.incarnation, "", card)
    with pytest.raises(TransportError, match="another producer"):
        consumer.transport.connect(new_incarnation(), "", card)
    with pytest.raises(TransportError, match="not a card"):
        consumer.transport.connect(new_incarnation(), "", b"\x93\x01")
    elsewhere.transport.stop()
    here = AgentWorker(folder, 7)
    card = here.transport.serve(here.slots, here.blocks)
    with pytest.raises(NoAgentYet):
        consumer.transport.connect(here.incarnation, "", card)
    here.transport.stop()


def test_memory_of_who_is_gone_is_let_go_of_at_once(
    running: Running, folder: Path, consumer: AgentWorker
) -> None:
    """Descriptors and mappings end with the connection of a producer, and of a consumer. Those of
    other tests may go meanwhile."""

    def held() -> tuple[int, int]:
        maps = Path("/proc/self/maps").read_text().count("memfd:tandem-kv")
        return len(os.listdir("/proc/self/fd")), maps

    def is_back() -> bool:
        return all(now <= then for now, then in zip(held(), before, strict=True))

    producer = AgentWorker(folder, 7)
    gc.collect()  # what goes later than here hides what stays
    before = held()
    peer = linked(consumer, producer)
    assert read(consumer, peer, block(0, 0)) is Progress.DONE
    producer.transport.stop()
    assert consumer.transport._asker.slots is not None
    consumer.transport._asker.slots.close()
    consumer.transport._asker.close()
    until(is_back)


def test_memory_stays_while_it_is_copied_from(
    folder: Path, monkeypatch: pytest.MonkeyPatch, consumer: AgentWorker, producer: AgentWorker
) -> None:
    """A producer that dies in mid-copy: its memory goes behind the copy, and no sooner."""
    held = Held(monkeypatch)
    running = Running(folder)
    peer = linked(consumer, producer)
    ticket = consumer.transport.read(peer, [block(0, 0)])
    begun(consumer, held, 1)
    known = running.agent._producers.known[peer]
    producer.transport.stop()
    until(lambda: peer not in running.agent._producers.known)
    assert all(each.descriptor >= 0 for each in known.sources.values())  # type: ignore[attr-defined]
    held.through = True
    assert ended(consumer.transport, ticket) is Progress.DONE
    assert consumer.kv_cache[0].all()
    until(lambda: all(each.descriptor < 0 for each in known.sources.values()))  # type: ignore[attr-defined]
    running.stop()


def test_a_consumer_that_asks_for_much_waits_for_its_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch, consumer: AgentWorker, producer: AgentWorker
) -> None:
    """One whose copies hang has as many under way as it may; another's are made all the while."""
    held = Held(monkeypatch)
    running = Running(folder)
    peer = linked(consumer, producer)
    stuck = consumer.transport.read(peer, [block(each, each) for each in range(BLOCKS)])
    begun(consumer, held, 3)  # per_peer slots
    monkeypatch.undo()
    other = AgentWorker(folder, 0)
    other.transport.receive(other.slots, other.blocks)
    other.transport.connect(peer, "", agent_card(consumer, peer, folder))
    assert read(other, peer, *[block(each, each) for each in range(BLOCKS)]) is Progress.DONE
    assert consumer.transport.poll(stuck) is Progress.PENDING
    held.through = True
    assert ended(consumer.transport, stuck) is Progress.DONE
    other.transport.stop()
    running.stop()


def agent_card(consumer: AgentWorker, peer: Incarnation, folder: Path) -> bytes:
    """The card that the consumer was given."""
    secret = consumer.transport._secrets[peer]
    place = place_of(folder)
    return wire.encode(wire.AgentCard(wire.VERSION, place, peer, secret))


def test_the_agent_is_named_once_and_its_socket_swept(folder: Path) -> None:
    """A second agent in the same folder is refused; a dead one's socket is taken over."""
    running = Running(folder)
    with pytest.raises(TransportError, match="another agent serves"):
        Running(folder)
    path = running.agent.path
    assert path.stat().st_mode & 0o177 == 0
    running.stop()
    assert not path.exists()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
        dead.bind(str(path))
    Running(folder).stop()


def test_who_asked_nothing_for_long_does_not_find_the_agent_silent(
    running: Running, consumer: AgentWorker, producer: AgentWorker
) -> None:
    """Its silence counts from a request on."""
    peer = linked(consumer, producer)
    assert read(consumer, peer, block(0, 0)) is Progress.DONE
    consumer.transport._asker._received_at -= 10 * landing.AGENT_SECONDS
    assert read(consumer, peer, block(1, 1)) is Progress.DONE


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_nobody_takes_the_agents_place(folder: Path) -> None:
    """In a folder that is another's, a worker gives its memory to the owner and root alone; and
    the owner's agent takes its socket's name back from who sits on it."""
    os.chown(folder, 4321, -1)
    program = """
import os, socket, sys
os.setuid(int(sys.argv[2]))
sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
sock.bind(sys.argv[1]), sock.listen(1), print("here", flush=True), sys.stdin.read()
"""
    folder.chmod(0o1777)
    words = [sys.executable, "-c", program, str(folder / "agent.sock"), "65534"]
    with subprocess.Popen(words, stdin=-1, stdout=-1) as other:
        assert other.stdout is not None
        assert other.stdout.readline()
        with pytest.raises(TransportError, match="is user 65534's"):
            Line(folder)
        running = Running(folder)
        Line(folder).close()
        running.stop()
        assert other.stdin is not None
        other.stdin.close()
