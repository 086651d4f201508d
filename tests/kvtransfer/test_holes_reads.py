"""Hole 14: reads that hang, that are given up, or that nobody knows the state of."""

import socket
import threading

import pytest
from tests.kvtransfer.builders import LAYOUT, Consumer, Producer, make_config
from tests.kvtransfer.machines import make_key
from tests.kvtransfer.memory_transport import MemoryTransport
from tests.kvtransfer.uneven import UnevenNixl

from tandem.kvtransfer import events
from tandem.kvtransfer.handoff.actions import Read
from tandem.kvtransfer.handoff.messages import ProducerCard
from tandem.kvtransfer.memory.slots import SlotMemory
from tandem.kvtransfer.mover.prober import NO_SLOT
from tandem.kvtransfer.mover.reads import Reads
from tandem.kvtransfer.transports.base import Progress, Ticket
from tandem.kvtransfer.transports.nixl import NixlTransport
from tandem.protocol.card import Shard
from tandem.protocol.errors import FailCause
from tandem.protocol.ids import new_incarnation


def test_hole_14_hanging_reads_are_capped_and_then_reported(workers):
    """A producer's hanging reads keep their slots in quarantine; above half of all the worker
    asks to be replaced, and when the reads land the slots are used again."""
    config = make_config(kv_connector="memory", kv_slots=3, kv_slots_per_peer=2)
    producer = workers(Producer, config)
    transport = MemoryTransport()
    consumer = workers(Consumer, config, transports={"memory": transport})
    consumer.meet(producer)
    transport.hold.set()
    keys = [make_key(f"hang{n}") for n in range(3)]
    for n, key in enumerate(keys):
        consumer.open(key, producer.incarnation)
        producer.hand_over(key, 4, [n], consumer.incarnation)
        consumer.load(key, [20 + n])
    ring = consumer.service._mover.table.ring
    consumer.until(lambda: ring.free == 1)
    for key in keys:
        consumer.service.cancel(key)
        consumer.wait_for(events.Cancelled, key)
    assert ring.quarantined == 2
    assert "receive slots" in (consumer.service.problem() or "")
    transport.hold.clear()
    consumer.until(lambda: ring.free == 3)
    assert consumer.service.problem() is None


def test_hole_14_hanging_reads_of_one_producer_are_reported_however_many_slots_there_are(workers):
    """All that it may have, which lets no link to it up, and less than half of all: as many as by
    default. A worker that has no other producer computes every prompt, and is to say why."""
    config = make_config(kv_connector="memory", kv_transfer_seconds=0.2)
    producer = workers(Producer, config)
    transport = MemoryTransport()
    consumer = workers(Consumer, config, transports={"memory": transport})
    consumer.meet(producer)
    transport.hold.set()
    ring = consumer.service._mover.table.ring
    keys = [make_key(f"hang{n}") for n in range(ring.per_peer)]
    for n, key in enumerate(keys):
        consumer.open(key, producer.incarnation)
        producer.hand_over(key, 4, [n], consumer.incarnation)
        consumer.load(key, [20 + n])
    for key in keys:
        consumer.wait_for(events.LoadFailed, key)
    assert 2 * ring.per_peer <= len(ring)
    consumer.until(consumer.service.problem)
    assert producer.incarnation.hex()[:8] in (consumer.service.problem() or "")
    assert consumer.service.ended() is None
    wanted = {producer.service.control: producer.incarnation}
    consumer.service.set_peers({})
    assert consumer.service.problem() is None, "it has gone: nobody misses a link to it"
    consumer.service.set_peers(wanted)
    assert consumer.service.problem() is not None
    book, other = consumer.service._mover.book, new_incarnation()
    book.mark(other, up=True)
    assert consumer.service.problem() is None, "hand-offs of another go on"
    book.mark(other, up=False)
    assert consumer.service.problem() is not None
    transport.hold.clear()
    consumer.until(lambda: consumer.service.problem() is None)
    consumer.until(lambda: consumer.service.peer_up(producer.incarnation))


def test_hole_14_a_read_that_was_given_up_ends_though_nobody_asks_for_more(workers):
    """NIXL moves a read only while the producer calls it, which has nothing else to do by then."""
    config, transport = make_config(kv_connector="nixl"), UnevenNixl()
    producer = workers(Producer, config, transports={"nixl": transport})
    consumer = workers(Consumer, config)
    consumer.meet(producer)
    key = make_key("given up")
    consumer.open(key, producer.incarnation)
    transport.stand()
    producer.hand_over(key, 4, [0], consumer.incarnation)
    consumer.load(key, [20])
    imports, exports = consumer.service._mover.table.ring, producer.service._mover.table.ring
    consumer.until(lambda: imports.free < len(imports) and exports.free < len(exports))
    consumer.service.cancel(key)
    consumer.wait_for(events.Cancelled, key)
    producer.until(lambda: exports.free == len(exports))
    assert imports.quarantined == 1
    transport.go_on()
    consumer.until(lambda: imports.free == len(imports))


@pytest.mark.parametrize("pair", ["tcp"], indirect=True)
def test_hole_14_a_read_that_failed_costs_its_link_which_comes_back_with_another_way(pair):
    """A data connection that broke must not fail every request for as long as the beats go on."""
    producer, consumer = pair
    mover, peer = consumer.service._mover, producer.incarnation
    first = mover._links[peer]

    def hand_over(name: str, ending: type) -> None:
        key = make_key(name)
        consumer.open(key, peer)
        producer.hand_over(key, 4, [0], consumer.incarnation)
        consumer.load(key, [20])
        consumer.wait_for(ending, key)

    mover.parts.transports["tcp"]._links[peer].streams[0].sock.shutdown(socket.SHUT_RDWR)
    hand_over("unlucky", events.LoadFailed)
    consumer.until(lambda: mover._links.get(peer, first) != first)
    consumer.until(lambda: consumer.service.peer_up(peer))
    hand_over("next", events.Loaded)
    assert consumer.holds("next", 4, [20])


def swallow(sender) -> None:
    """Whatever this thread of the tcp transport answers on connections of now comes to nobody."""
    now, send = set(sender._peers), sender._send

    def sends(peer):
        if peer not in now:
            send(peer)

    sender._send = sends


@pytest.mark.parametrize("wanted", [True, False])
def test_hole_14_a_read_that_hangs_costs_its_link_whose_next_data_path_serves(workers, wanted):
    """Beats go on while the data path is dead: nothing else would ever end the link, and each of
    its hand-offs would wait its time out."""
    config = make_config(kv_transfer_seconds=1.0, kv_slots=4, kv_slots_per_peer=1)
    producer, consumer = workers(Producer, config), workers(Consumer, config)
    consumer.meet(producer)
    mover, peer = consumer.service._mover, producer.incarnation
    first, ring = mover._links[peer], mover.table.ring
    server = producer.service._mover.parts.transports["tcp"]._server
    senders, streams = (server, *server._others), mover.parts.transports["tcp"]._links[peer].streams
    consumer.until(lambda: sum(each.num_peers for each in senders) == len(streams))
    for sender in senders:
        swallow(sender)
    key = make_key("swallowed")
    consumer.open(key, peer)
    producer.hand_over(key, 4, [0], consumer.incarnation)
    consumer.load(key, [20])
    if not wanted:
        consumer.until(lambda: ring.free < len(ring))
        consumer.service.cancel(key)
    consumer.wait_for(events.LoadFailed if wanted else events.Cancelled, key)
    consumer.until(lambda: mover._links.get(peer, first) != first)
    consumer.until(lambda: consumer.service.peer_up(peer))
    assert ring.quarantined == 0
    key = make_key("next")
    consumer.open(key, peer)
    producer.hand_over(key, 4, [1], consumer.incarnation)
    consumer.load(key, [20])
    consumer.wait_for(events.Loaded, key)
    assert consumer.holds("next", 4, [20])


@pytest.mark.parametrize("read_ends", [True, False])
def test_hole_14_a_read_hangs_when_no_younger_one_of_its_link_ends(monkeypatch, read_ends):
    """What one link's reads do says nothing of another's, nor of the link that the peer had."""
    now = 0.0
    monkeypatch.setattr("tandem.kvtransfer.mover.reads.time.perf_counter", lambda: now)
    transport, slots = MemoryTransport(), SlotMemory(4, 4096)
    group = LAYOUT.groups[0]
    transport.receive(slots)
    reads = Reads({"memory": transport}, LAYOUT, Shard(0, 1), lambda: None)
    welcome = ProducerCard("memory", b"", 4096, 4, group.block_bytes)
    one, other = new_incarnation(), new_incarnation()
    transport.hold.set()

    def begin(peer, slot):
        reads.start(Read(make_key(f"r{slot}"), peer, 0, 0, slot, 100), welcome, slots)

    def pass_time():
        nonlocal now
        for _ in range(8):
            now += 0.2
            found.extend(reads.hung(1.0))

    found: list[bytes] = []
    monkeypatch.setattr(transport, "read", lambda peer, extents: len(reads._open))
    begin(one, 0)
    for peer in (one, other):
        now += 0.1
        reads.link_up(peer)
    pass_time()
    assert found == [], "the read is of an earlier link"
    begin(one, 1)
    begin(other, 2)
    now += 0.2
    begin(one, 3)
    copy = Read(make_key("copy"), other, 0, None, None, 100)
    reads._open[("memory", Ticket(99))] = (copy, now)
    ends = {3} if read_ends else set()
    monkeypatch.setattr(transport, "advance", lambda: None)
    monkeypatch.setattr(
        transport, "poll", lambda t: Progress.DONE if t in ends else Progress.PENDING
    )
    reads.ended()
    pass_time()
    assert sorted(found) == sorted([other] if read_ends else [one, other])
    for _ in range(2):
        pass_time()
    assert len(found) == (1 if read_ends else 2), "each is said once, and a copy not at all"


@pytest.mark.parametrize("in_time", [True, False])
def test_hole_14_reads_of_earlier_links_end_too_and_their_slots_let_the_next_link_up(
    workers, in_time
):
    """A link that was never up must not take the library's way to its peer with it."""
    config = make_config(
        kv_connector="nixl", kv_slots_per_peer=1, kv_connect_seconds=5.0 if in_time else 0.2
    )
    standing = UnevenNixl()
    producer = workers(Producer, config, transports={"nixl": standing})
    consumer = workers(Consumer, config)
    consumer.meet(producer)
    standing.stand()
    key, mover, peer = make_key("earlier"), consumer.service._mover, producer.incarnation
    ring = mover.table.ring
    consumer.open(key, peer)
    producer.hand_over(key, 4, [0], consumer.incarnation)
    consumer.load(key, [20])
    consumer.until(lambda: ring.free < len(ring))
    for _ in range(2):
        consumer.service.set_peers([])
        consumer.until(lambda: not mover._links and ring.quarantined == 1)
        consumer.service.set_peers([producer.service.control])
        consumer.until(lambda: consumer.service.why_down(peer) == NO_SLOT)
    standing.go_on()
    consumer.until(lambda: consumer.service.peer_up(peer))
    consumer.until(lambda: ring.free == len(ring))
    assert peer not in mover.throughput._links, "the link that stands has brought no KV"
    assert peer in mover.prober._unused


class _DoubtfulAgent:
    """NIXL's agent, which cannot say how one read stands while ``doubts`` is set."""

    def __init__(self, agent) -> None:
        self._agent = agent
        self._read = None
        self.doubts = threading.Event()

    def check_xfer_state(self, handle):
        if self.doubts.is_set():
            self._read = self._read or handle
            if handle is self._read:
                raise RuntimeError("no state")
        return self._agent.check_xfer_state(handle)

    def __getattr__(self, name):
        return getattr(self._agent, name)


def test_hole_14_a_read_that_nobody_knows_the_state_of_costs_its_link_once(workers, caplog):
    """Its request fails, its slot waits, the log has one line, the link comes back beside it."""
    config = make_config(kv_connector="nixl")
    transport, standing = NixlTransport(new_incarnation(), "consumer"), UnevenNixl()
    agent = transport._agent = _DoubtfulAgent(transport._agent)
    producer = workers(Producer, config, transports={"nixl": standing})
    consumer = workers(Consumer, config, transports={"nixl": transport})
    consumer.meet(producer)
    standing.stand()
    key, ring = make_key("doubted"), consumer.service._mover.table.ring
    consumer.open(key, producer.incarnation)
    producer.hand_over(key, 4, [0], consumer.incarnation)
    consumer.load(key, [20])
    consumer.until(lambda: ring.free < len(ring))
    agent.doubts.set()
    assert consumer.wait_for(events.LoadFailed, key).cause is FailCause.PEER
    assert not consumer.service.peer_up(producer.incarnation)
    standing.go_on()
    consumer.until(lambda: consumer.service.peer_up(producer.incarnation))
    consumer.until(lambda: ring.free == len(ring) - 1)
    assert ring.quarantined == 1
    assert sum("unknown state" in record.message for record in caplog.records) == 1
    agent.doubts.clear()
    consumer.until(lambda: ring.free == len(ring))
    assert consumer.service.peer_up(producer.incarnation)
