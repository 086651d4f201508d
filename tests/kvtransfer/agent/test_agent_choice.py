"""Who copies between workers of one node: direct before agent before what crosses machines, link by
link; and links come back to the agent when it comes back, or comes at all."""

from __future__ import annotations

import time

import pytest
import torch
from tests.kvtransfer.agent.agents import Running
from tests.kvtransfer.builders import Consumer, Producer, make_config, make_key
from tests.kvtransfer.coming_back import comes_back
from tests.kvtransfer.test_falls import Pair, choosing

from tandem.kvtransfer import events
from tandem.kvtransfer.config import KVTransferConfig
from tandem.kvtransfer.control import client
from tandem.kvtransfer.errors import TransportError
from tandem.kvtransfer.service.parts import make_transports
from tandem.kvtransfer.transports.agent.landing import GPU_FACTOR, LandingSizes
from tandem.protocol.errors import InvalidParameter
from tandem.protocol.ids import new_incarnation
from tandem.worker.connectors.role import kv_cache_allocator


@pytest.mark.parametrize(
    ("copy", "first"),
    [("auto", ("shm", "shm_agent")), ("direct", ("shm",)), ("agent", ("shm_agent",))],
)
def test_the_order_of_ways_is_as_asked(folder, copy, first):
    _, offered = choosing(folder, kv_node_copy=copy)
    assert offered[: len(first)] == first
    assert offered[len(first)] in ("nixl", "tcp")


@pytest.mark.parametrize(
    ("copy", "ways"),
    [("auto", ("shm", "shm_agent")), ("direct", ("shm",)), ("agent", ("shm_agent",))],
)
def test_a_way_of_the_node_by_name_is_no_other(folder, copy, ways):
    _, offered = choosing(folder, kv_connector="shm", kv_node_copy=copy)
    assert offered == ways


def test_workers_that_do_not_meet_have_no_link_by_name(workers, folder, running):
    """Where auto would go by the network; those that meet hand over by the agent."""
    more = {"kv_connector": "shm", "kv_node_copy": "agent"}
    near = Pair(workers, folder, folder, **more)
    assert near.transport == "shm_agent"
    near.hand_over("near")
    assert running.agent.counts["copies"] > 0
    apart = folder / "apart"
    apart.mkdir()
    producer = workers(Producer, make_config(kv_node_folder=str(apart), **more))
    service = near.consumer.service
    service.set_peers({producer.service.control: producer.incarnation})

    def reason() -> str:
        found = [each for each in service.peer_health() if each.peer == producer.incarnation]
        return found[0].reason if found else ""

    near.consumer.until(lambda: "uses another agent" in reason())
    assert not service.peer_up(producer.incarnation)


@pytest.mark.full
@pytest.mark.parametrize("copy", ["agent", "auto"])
def test_a_link_whose_ways_fail_at_once_is_not_made_again_and_again(
    workers, folder, running, monkeypatch, copy
):
    """Each time it was called, greeted, dropped and called again, twenty times a second."""
    more = {"kv_connector": "shm", "kv_node_copy": copy, "kv_quarantine_seconds": 1.0}
    apart = folder / "apart"
    apart.mkdir()
    producer = workers(Producer, make_config(kv_node_folder=str(apart), **more))
    consumer = workers(Consumer, make_config(kv_node_folder=str(folder), **more))
    channel, calls = consumer.service._channel, []
    connect = channel._connect

    def counted(*args):
        calls.append(time.monotonic())
        connect(*args)

    monkeypatch.setattr(channel, "_connect", counted)
    consumer.service.set_peers({producer.service.control: producer.incarnation})
    consumer.until(lambda: "uses another agent" in consumer.service.why_down(producer.incarnation))
    end = time.monotonic() + 3.0
    consumer.until(lambda: time.monotonic() > end)
    assert 1 < len(calls) < 12


def test_a_link_that_stood_for_long_is_made_again_soon(workers, monkeypatch):
    """Whatever its pauses were before; one that has just begun to stand changes nothing of them."""
    producer, consumer = workers(Producer), workers(Consumer)
    consumer.meet(producer)
    (known,) = consumer.service._channel._producers.values()
    for steady, pause in ((10**9, 2000), (0, 2 * client.FIRST_PAUSE_MS)):
        monkeypatch.setattr(client, "STEADY_MS", steady)
        known.pause_ms, link = client.LONGEST_PAUSE_MS, known.link
        consumer.service._mover.drop(producer.incarnation, "a word of the test")
        consumer.until(lambda link=link: known.link not in (None, link))
        assert known.pause_ms == pause
        consumer.until(lambda: consumer.service.peer_up(producer.incarnation))


def test_a_choice_that_nothing_would_follow_is_refused():
    """Without a folder, or by a connector that does not look there, nobody would be asked."""
    for more in ({}, {"kv_connector": "nixl", "kv_node_folder": "/x"}, {"kv_connector": "shm"}):
        with pytest.raises(InvalidParameter, match="kv_node_copy"):
            make_config(**{"kv_connector": "auto", "kv_node_copy": "agent", **more})
    with pytest.raises(InvalidParameter, match="kv_node_copy"):
        make_config(kv_connector="auto", kv_node_folder="/x", kv_node_copy="both")


def test_a_name_wants_memory_where_it_reaches(folder):
    """The host's for shm_agent, which the slab's allocator knows; a GPU's for cuda_p2p_agent."""
    for name, on_gpu in (("cuda_p2p_agent", False), ("shm_agent", True)):
        config = make_config(kv_connector=name, kv_node_folder=str(folder))
        with pytest.raises(TransportError, match="kv_connector"):
            make_transports(config, new_incarnation(), "consumer", on_gpu=on_gpu)
    assert kv_cache_allocator(make_config(kv_connector="shm_agent")) is not None


def test_without_direct_copies_the_agent_is_next(workers, folder, running, monkeypatch):
    """As between pods that see only their own GPU: mapping fails on this link alone."""

    def refuse(*_args):
        raise TransportError("not to be mapped from here")

    monkeypatch.setattr(
        "tandem.kvtransfer.transports.mapped.transport.MappedTransport.connect", refuse
    )
    pair = Pair(workers, folder, folder)
    assert pair.transport == "shm_agent"
    pair.hand_over("between")
    assert running.agent.counts["copies"] > 0
    series = pair.consumer.registry.get_sample_value
    labels = {"role": "consumer", "outcome": "loaded"}
    pair.consumer.until(lambda: series("tandem:kv_handoffs_total", labels) == 1)


def test_a_link_that_goes_back_to_mapping_leaves_the_agent(workers, folder, running):
    """What the agent copied into for it is let go of."""
    pair = Pair(workers, folder, folder, kv_quarantine_seconds=300.0)
    ways = pair.consumer.service._mover.parts.transports
    peer, key = pair.producer.incarnation, make_key("broken")
    pair.consumer.open(key, peer)
    pair.producer.hand_over(key, 4, [0], pair.consumer.incarnation)
    pair.consumer.wait_for(events.Ready, key)
    ways["shm"]._peers[peer].closed = True
    pair.consumer.load(key, [1])
    pair.consumer.until(lambda: pair.transport == "shm_agent")
    assert ways["shm_agent"].held_bytes > 0
    comes_back(pair.consumer, "shm")
    pair.consumer.until(lambda: ways["shm_agent"].held_bytes == 0)


def test_links_fall_while_the_agent_is_away_and_come_back(workers, folder):
    """The agent restarts: hand-offs go by the next way meanwhile, and by it again afterwards."""
    first = Running(folder)
    pair = Pair(workers, folder, folder, kv_node_copy="agent", kv_quarantine_seconds=300.0)
    assert pair.transport == "shm_agent"
    pair.hand_over("before")
    first.stop()
    pair.consumer.service.set_peers({})
    pair.consumer.until(lambda: pair.transport == "")
    pair.consumer.meet(pair.producer)
    pair.consumer.until(lambda: pair.transport in ("nixl", "tcp"))
    pair.hand_over("meanwhile")
    second = Running(folder)
    comes_back(pair.consumer, "shm_agent")
    pair.hand_over("again")
    second.stop()


def test_an_agent_that_comes_after_the_workers_is_taken(workers, folder):
    """A node's pods begin in any order."""
    pair = Pair(workers, folder, folder, kv_node_copy="agent", kv_quarantine_seconds=300.0)
    assert pair.transport in ("nixl", "tcp")
    running = Running(folder)
    comes_back(pair.consumer, "shm_agent")
    pair.hand_over("late")
    running.stop()


def test_a_node_without_an_agent_costs_a_link_no_time(workers, folder):
    """By default direct comes first, and the agent is not even asked."""
    pair = Pair(workers, folder, folder)
    assert pair.transport == "shm"
    pair.hand_over("direct")


def test_ends_in_folders_of_their_own_do_not_wait_for_an_agent(workers, folder):
    """Two machines with an agent each: the card says that it is another's."""
    one, two = folder / "one", folder / "two"
    one.mkdir()
    two.mkdir()
    agents = [Running(each) for each in (one, two)]
    pair = Pair(workers, one, two, kv_node_copy="agent")
    assert pair.transport in ("nixl", "tcp")
    pair.hand_over("apart")
    assert all(each.agent.counts["copies"] == 0 for each in agents)
    for each in agents:
        each.stop()


def test_the_way_is_named(workers, folder, running):
    """In the series that says what is preferred, as in the peers' health."""
    config = make_config(kv_connector="shm_agent", kv_node_folder=str(folder))
    producer, consumer = workers(Producer, config), workers(Consumer, config)
    consumer.meet(producer)
    (health,) = consumer.service.peer_health()
    assert health.transport == "shm_agent"
    preferred = consumer.metric(
        "tandem:kv_transport_info", role="consumer", connector="shm_agent", fallback="0"
    )
    assert preferred == 1


def test_landing_slots_of_a_gpu_are_larger_and_fewer_unless_their_size_is_set():
    """In all as many bytes as its receive slots, for a consumer and for each peer."""
    kv_cache = torch.zeros(1, dtype=torch.uint8)
    for size, factor in ((None, GPU_FACTOR), (1 << 20, 1)):
        config = KVTransferConfig(kv_slot_bytes=size, kv_slots=7, kv_slots_per_peer=5)
        host, gpu = LandingSizes(config), LandingSizes(config, on_gpu=True)
        slot_bytes, slots = host.of(4096, kv_cache)
        assert (slots, host.per_peer) == (7, 5)
        assert gpu.of(4096, kv_cache) == (slot_bytes * factor, -(-slots // factor))
        assert gpu.per_peer == -(-5 // factor)
