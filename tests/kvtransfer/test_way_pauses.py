"""Where every way of a link has failed, those by which the ends had met are tried again soon."""

from __future__ import annotations

import socket

import pytest
from tests.kvtransfer.builders import Consumer, Producer, make_config, make_key
from tests.kvtransfer.test_falls import PEER

from tandem.kvtransfer import events
from tandem.kvtransfer.control.client import (
    FIRST_PAUSE_MS,
    LONGEST_PAUSE_MS,
    STEADY_MS,
    ControlClient,
)
from tandem.kvtransfer.control.mail import Drop, LinkNumber, SetPeers
from tandem.kvtransfer.errors import TransportError
from tandem.kvtransfer.handoff.actions import Millis
from tandem.kvtransfer.transports import choose

WAYS = ("shm", "shm_agent", "tcp")


def test_a_failed_read_takes_the_only_way_to_another_node_down_for_moments(
    workers, folder, monkeypatch
):
    """Workers that meet others in a folder, and this peer by tcp alone: they had no link for as
    long as tcp was withheld, where those without a folder have one at once."""

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


@pytest.fixture
def client(client: ControlClient) -> ControlClient:
    """One that calls a peer at which nobody listens, by several ways."""
    client.connectors = WAYS
    client.post(SetPeers(("127.0.0.1:9",)))
    client._turn()
    return client


def _drop(client: ControlClient, now: int, way: str, **more: object) -> int:
    """Milliseconds until the link is tried again once it has failed so."""
    (producer,) = client._producers.values()
    client._by_number[LinkNumber(77)] = producer
    drop = Drop(LinkNumber(77), "it failed", without=way, without_ms=30_000, **more)  # type: ignore[arg-type]
    client.on_item(drop, Millis(now))
    return producer.retry_at - now


def test_the_way_by_which_ends_had_met_is_tried_with_pauses_that_grow(client):
    """As on a link of one way; and by nothing else before that may be tried."""
    (producer,) = client._producers.values()
    client._close(producer)
    assert _drop(client, 0, "tcp", met=True) == FIRST_PAUSE_MS
    assert client._offered(producer, Millis(50)) == ("shm", "shm_agent")
    assert _drop(client, 50, "shm") == FIRST_PAUSE_MS
    pauses = [_drop(client, 100, "shm_agent")]
    for _ in range(8):
        assert client._offered(producer, Millis(150)) == ("tcp",)
        pauses.append(_drop(client, 150, "tcp", met=True))
    assert pauses[:4] == [FIRST_PAUSE_MS << doubled for doubled in range(4)]
    assert pauses[-2:] == [LONGEST_PAUSE_MS] * 2
    assert _drop(client, 40_000, "tcp", met=True) == FIRST_PAUSE_MS  # shm may be tried again


@pytest.mark.parametrize("last", [{}, {"met": True, "rest_ms": 10_000}])
def test_ways_by_which_nothing_reaches_or_that_rest_are_not(client, last):
    """The link waits for the first that may be tried."""
    (producer,) = client._producers.values()
    client._close(producer)
    if last:
        producer.met.add("tcp")
    _drop(client, 0, "shm")
    _drop(client, 0, "shm_agent")
    assert _drop(client, 100, "tcp", **last) == 29_900


def test_a_link_that_stood_for_long_takes_the_pauses_back(client):
    """Those between two tries of the way by which the ends had met, too."""
    (producer,) = client._producers.values()
    producer.back_ms, link = LONGEST_PAUSE_MS, producer.link
    assert link is not None
    link.since = Millis(0)
    link.session.peer = PEER
    client._lose(producer, "it ends", Millis(STEADY_MS))
    assert producer.back_ms == FIRST_PAUSE_MS
