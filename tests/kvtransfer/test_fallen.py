"""Links that go a worse way than one that failed on them are counted, and no others."""

from __future__ import annotations

import pytest
from tests.kvtransfer.agent.agents import Running
from tests.kvtransfer.builders import make_key
from tests.kvtransfer.coming_back import comes_back
from tests.kvtransfer.test_falls import Pair

from tandem.kvtransfer import events
from tandem.kvtransfer.errors import TransportError


def fell(pair: Pair, connector: str) -> bool:
    """Whether the one link is counted as one that misses this way, and no other."""
    series = pair.consumer.registry.get_sample_value
    ways = ("shm", "shm_agent", "nixl")
    found = {each: series("tandem:kv_links_fallen", {"connector": each}) or 0 for each in ways}
    return found == {**dict.fromkeys(ways, 0), **({connector: 1} if connector else {})}


def test_a_dead_agent_shows_until_another_has_come(workers, folder):
    """Its link goes by the next way, and somebody is to know."""
    agent = Running(folder)
    pair = Pair(workers, folder, folder, kv_node_copy="agent", kv_quarantine_seconds=300.0)
    assert pair.transport == "shm_agent"
    assert fell(pair, "")
    agent.stop()
    key = make_key("lost")
    pair.consumer.open(key, pair.producer.incarnation)
    pair.producer.hand_over(key, 4, [0], pair.consumer.incarnation)
    pair.consumer.load(key, [1])
    pair.consumer.wait_for(events.LoadFailed, key)
    pair.consumer.until(lambda: pair.transport in ("nixl", "tcp"))
    assert fell(pair, "shm_agent")
    following = Running(folder)
    comes_back(pair.consumer, "shm_agent")
    pair.consumer.until(lambda: fell(pair, ""))
    following.stop()


def test_an_agent_that_never_was_shows(workers, folder):
    """Both ends meet where it is to be. Who is no peer any more misses nothing."""
    pair = Pair(workers, folder, folder, kv_node_copy="agent")
    assert pair.transport in ("nixl", "tcp")
    assert fell(pair, "shm_agent")
    pair.consumer.service.set_peers({})
    pair.consumer.until(lambda: fell(pair, ""))


def test_what_cannot_be_mapped_shows_where_there_is_no_agent(workers, folder, monkeypatch):
    """P gives its memory, and D cannot have it."""

    def refuse(*_args):
        raise TransportError("not to be mapped from here")

    copier = "tandem.kvtransfer.transports.mapped.copiers.HostCopier.map"
    monkeypatch.setattr(copier, refuse)
    pair = Pair(workers, folder, folder, kv_node_copy="direct")
    assert pair.transport in ("nixl", "tcp")
    assert fell(pair, "shm")


@pytest.mark.parametrize("copy", ["direct", "agent", "auto"])
def test_ends_of_two_machines_show_nothing(workers, folder, copy):
    places = [folder / "one", folder / "two"]
    for each in places:
        each.mkdir()
    agents = [Running(each) for each in places]
    pair = Pair(workers, *places, kv_node_copy=copy)
    assert pair.transport in ("nixl", "tcp")
    assert fell(pair, "")
    for running in agents:
        running.stop()


def test_a_link_by_the_agent_that_could_not_be_mapped_shows_nothing(workers, node, monkeypatch):
    transport = "tandem.kvtransfer.transports.mapped.transport"

    def refuse(*_args):
        raise TransportError("not to be mapped from here")

    monkeypatch.setattr(f"{transport}.PeerMemory", refuse)
    folder = node.agent.path.parent
    pair = Pair(workers, folder, folder)
    assert pair.transport == "shm_agent"
    assert fell(pair, "")
