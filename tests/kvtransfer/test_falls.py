"""Links that choose: shm where both ends meet, the next where they do not, and back again."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from tests.kvtransfer.builders import (
    FINGERPRINT,
    LAYOUT,
    NUM_BLOCKS,
    Consumer,
    Producer,
    make_config,
    make_key,
    slab_for,
)
from tests.kvtransfer.memory_transport import MemoryTransport

from tandem.kvtransfer import events
from tandem.kvtransfer.config import millis
from tandem.kvtransfer.control.mail import LinkNumber
from tandem.kvtransfer.errors import TransportError
from tandem.kvtransfer.handoff.actions import Millis
from tandem.kvtransfer.handoff.pull import Cancel, Opened, Pull
from tandem.kvtransfer.mover.consumer import ConsumerMover
from tandem.kvtransfer.service import parts as choose
from tandem.kvtransfer.service.parts import make_parts, make_transports
from tandem.memory.shared import shared_tensor
from tandem.protocol.ids import Incarnation, RequestKey, new_incarnation
from tandem.worker.connectors.role import kv_cache_allocator

PEER = Incarnation(b"p" * 16)


def choosing(folder: Path, **more):
    """What ``auto`` makes of a folder, without nixl."""
    config = make_config(**{"kv_connector": "auto", "kv_node_folder": str(folder), **more})
    found = make_transports(config, new_incarnation(), "consumer")
    for each in found.values():
        each.stop()
    return config, tuple(found)


def made(workers, kind, folder: Path, **more):
    """A worker that meets its peers there."""
    config = make_config(**{"kv_connector": "auto", "kv_node_folder": str(folder), **more})
    return workers(kind, config)


class Pair:
    """A producer and a consumer that each offer shm and tcp."""

    def __init__(self, workers, there: Path, here: Path, **more) -> None:
        self.producer = made(workers, Producer, there, **more)
        self.consumer = made(workers, Consumer, here, **more)
        self.consumer.meet(self.producer)

    @property
    def transport(self) -> str:
        known = self.consumer.service.peer_health()
        assert len(known) <= 1
        return known[0].transport if known and known[0].up else ""

    def hand_over(self, name: str) -> None:
        """One request, whose bytes must be right."""
        key, consumer = make_key(name), self.consumer
        consumer.open(key, self.producer.incarnation)
        self.producer.hand_over(key, 8, [0, 1], consumer.incarnation)
        consumer.load(key, [4, 5])
        consumer.wait_for(events.Loaded, key)
        assert consumer.holds(name, 8, [4, 5])
        self.producer.wait_for(events.Released, key)


def test_auto_offers_shm_where_a_folder_to_meet_is_named(folder):
    """And not otherwise: most workers have no peer on their machine."""
    _, offered = choosing(folder)
    assert offered[0] == "shm"
    assert offered[-1] == "tcp"
    plain = make_transports(make_config(kv_connector="auto"), new_incarnation(), "consumer")
    assert "shm" not in plain
    for each in plain.values():
        each.stop()


@pytest.mark.parametrize("meets", [True, False])
def test_gpus_that_meet_copy_before_anything_else(folder, monkeypatch, meets):
    """With a folder auto offers cuda_p2p, then the agent, then what reaches other machines."""
    asked = []

    def mapped(name, *_args, on_gpu, **_more):
        asked.append((name, on_gpu))
        return MemoryTransport(direct=True)

    def agent(name, *_args, on_gpu):
        return mapped(name, on_gpu=on_gpu)

    monkeypatch.setattr("tandem.kvtransfer.transports.mapped.transport.make_mapped", mapped)
    monkeypatch.setattr("tandem.kvtransfer.transports.agent.transport.make_agent", agent)
    config = make_config(kv_connector="auto", kv_node_folder=str(folder) if meets else None)
    found = make_transports(config, new_incarnation(), "consumer", on_gpu=True)
    for each in found.values():
        each.stop()
    names = ("cuda_p2p", "cuda_p2p_agent") if meets else ()
    assert asked == [(name, True) for name in names]
    assert tuple(found)[:-1] == names
    assert tuple(found)[-1] in ("nixl", "tcp")


def test_a_way_that_cannot_serve_is_left_out_where_there_are_others(workers, folder, caplog):
    """A slab that no other process can map: links go by the next, and the log says why."""

    class Unshared(MemoryTransport):
        def serve(self, memory, blocks=None):
            raise TransportError("the memory cannot be shared")

    others = {"memory_blocks": Unshared(direct=True), "memory": MemoryTransport()}
    producer = workers(Producer, make_config(kv_connector="memory"), transports=others)
    consumer = workers(Consumer, make_config(kv_connector="memory"))
    consumer.meet(producer)
    assert consumer.service.peer_health()[0].transport == "memory"
    assert "KV does not go by memory_blocks: the memory cannot be shared" in caplog.text
    with pytest.raises(TransportError):
        workers(Producer, make_config(), transports={"memory_blocks": Unshared(direct=True)})


def test_a_slab_can_be_mapped_where_auto_may_choose_shm(folder):
    """Not on a GPU, whose memory the engine gives; nor where nobody meets."""
    config = make_config(kv_connector="auto", kv_node_folder=str(folder))
    assert kv_cache_allocator(config) is shared_tensor
    assert kv_cache_allocator(config, on_gpu=True) is None
    assert kv_cache_allocator(make_config(kv_connector="auto")) is None


def test_a_link_of_one_machine_goes_by_shm(workers, folder):
    """Both ends see the same socket."""
    pair = Pair(workers, folder, folder)
    assert pair.transport == "shm"
    pair.hand_over("near")


def test_ends_that_do_not_meet_go_by_the_next(workers, folder):
    """The same machine, but each has a folder of its own, as pods without a shared volume have: the
    socket is not there, and no name can say otherwise."""
    one, two = folder / "one", folder / "two"
    one.mkdir()
    two.mkdir()
    pair = Pair(workers, one, two)
    assert pair.transport in ("nixl", "tcp")
    pair.hand_over("apart")


def test_a_socket_of_another_is_no_way_to_a_peer(workers, folder):
    """A file of the right name at which nobody listens."""
    one, two = folder / "one", folder / "two"
    one.mkdir()
    two.mkdir()
    producer = made(workers, Producer, one)
    for each in one.iterdir():
        (two / each.name).write_bytes(b"not a socket")
    consumer = made(workers, Consumer, two)
    consumer.meet(producer)
    (health,) = consumer.service.peer_health()
    assert health.transport in ("nixl", "tcp")


@pytest.mark.parametrize("card", [b"", b"\xc1", b"\x93\xa1x", b"garbage" * 99])
def test_a_card_that_is_garbage_is_no_way_to_a_peer(workers, folder, card):
    """The offer of shm is not believed, and the link stands by another."""
    producer = made(workers, Producer, folder)
    producer.service._mover._cards["shm"] = card
    consumer = made(workers, Consumer, folder)
    consumer.meet(producer)
    (health,) = consumer.service.peer_health()
    assert health.transport in ("nixl", "tcp")


def test_a_link_comes_back_though_another_thread_counts_the_pause_from_later(workers, folder):
    """A busy machine, where an ended pause lasted still for who makes links: the link was made anew
    without shm once more, and nobody tried it again."""
    pair = Pair(workers, folder, folder, kv_quarantine_seconds=2.0)
    mover = pair.consumer.service._mover
    mover.parts.transports["shm"]._peers[pair.producer.incarnation].closed = True
    key = make_key("broken")
    pair.consumer.open(key, pair.producer.incarnation)
    pair.producer.hand_over(key, 4, [0], pair.consumer.incarnation)
    pair.consumer.wait_for(events.Ready, key)
    pair.consumer.load(key, [1])
    pair.consumer.wait_for(events.LoadFailed, key)
    pair.consumer.until(lambda: pair.transport in ("nixl", "tcp"))
    (known,) = mover.control._producers.values()
    known.without["shm"] = Millis(known.without["shm"] + 3_600_000)
    pair.consumer.until(lambda: pair.transport == "shm")


def alone(folder: Path) -> ConsumerMover:
    """A consumer's transfer thread that nobody runs."""
    config = make_config(kv_connector="auto", kv_node_folder=str(folder))
    parts = make_parts(
        config,
        "consumer",
        kv_cache=slab_for(config),
        layout=LAYOUT,
        num_blocks=NUM_BLOCKS,
        fingerprint=FINGERPRINT,
        incarnation=new_incarnation(),
        registry=CollectorRegistry(),
        notify=lambda: None,
        transports=None,
    )
    return ConsumerMover(parts)


def test_what_has_ended_costs_a_link_that_is_due_no_look(folder):
    """Tombstones stand for a minute, tens of thousands of them; the thread turns thousands of
    times a second."""
    mover, now, looked = alone(folder), Millis(1000), []

    class Seen(dict[RequestKey, Pull]):
        def __iter__(self):
            looked.append("keys")
            return super().__iter__()

        def values(self):
            looked.append("values")
            return super().values()

        def items(self):
            looked.append("items")
            return super().items()

    for number in range(20_000):
        mover.table.apply(Opened(make_key(f"{number}"), PEER, None, link_up=False), now)
    mover._links[PEER] = LinkNumber(1)
    mover.table.link_up(PEER)
    mover.table.apply(Opened(make_key("open"), PEER, None, link_up=True), now)
    mover.table.pulls = Seen(mover.table.pulls)
    assert len(mover.table.pulls) == 20_001
    mover.ways.worked(PEER, "shm")
    mover.ways.failed(PEER, "shm", Millis(0), met=True, may_come=False)
    now = Millis(millis(mover.config.kv_quarantine_seconds) + 1)
    mover.work(now)
    assert mover.ways.due(now)
    assert not looked
    mover.table.apply(Cancel(make_key("open")), now)
    mover.work(now)
    assert not mover.ways.due(now)
    assert not looked
    mover.stop()


def test_a_failed_read_takes_the_only_way_to_another_node_down_for_moments(
    workers, folder, monkeypatch
):
    """The last way is always offered, also between workers that meet others in a folder."""

    def no_nixl(*_args, **_more):
        raise TransportError("no nixl here")

    monkeypatch.setattr(choose, "NixlTransport", no_nixl)
    configs = []
    for name in ("one", "two"):
        (folder / name).mkdir()
        more = {"kv_node_folder": str(folder / name), "kv_quarantine_seconds": 300.0}
        configs.append(make_config(kv_connector="auto", **more))
    producer, consumer = workers(Producer, configs[0]), workers(Consumer, configs[1])
    consumer.meet(producer)
    peer, key = producer.incarnation, make_key("unlucky")
    tcp = consumer.service._mover.parts.transports["tcp"]
    tcp._links[peer].streams[0].sock.shutdown(socket.SHUT_RDWR)
    consumer.open(key, peer)
    producer.hand_over(key, 4, [0], consumer.incarnation)
    consumer.load(key, [20])
    consumer.wait_for(events.LoadFailed, key)
    consumer.until(lambda: not consumer.service.peer_up(peer))
    consumer.until(lambda: consumer.service.peer_up(peer))
    (health,) = consumer.service.peer_health()
    assert health.transport == "tcp"
