"""CURVE between routers and workers, and between workers: strangers out, rotations unnoticed."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import zmq
from tests.curve_keys import write_keys
from tests.kvtransfer.builders import Consumer, Producer, make_config
from tests.workers.hand_router import Router
from tests.workers.io_worker import Worker

from tandem.link.curve import CurveGuard
from tandem.link.liveness import LinkTimes
from tandem.protocol.card import PROTOCOL_VERSION
from tandem.protocol.commands import Command, CommandName
from tandem.protocol.ids import new_incarnation
from tandem.protocol.keys import KeyRing
from tandem.protocol.messages import Call, Hello
from tandem.router.metrics import RouterMetrics
from tandem.router.workers.pool import WorkerPool

WAIT = 60.0


@pytest.fixture
def rings(tmp_path: Path) -> dict[str, KeyRing]:
    """A generation of keys for every role."""
    return write_keys(tmp_path, router=1, prefill=1, decode=1)


@pytest.fixture
def guard(rings: dict[str, KeyRing]) -> Iterator[CurveGuard]:
    made = CurveGuard(rings["decode"])
    made.start()
    yield made
    made.stop()


@pytest.fixture
def worker(guard: CurveGuard) -> Iterator[Worker]:
    made = Worker(guard)
    made.thread.start()
    yield made
    made.thread.stop()


class Listener:
    def worker_up(self, worker: Any) -> None:
        """It is up."""

    def worker_lost(self, worker: Any, reason: str) -> None:
        """It is gone."""

    def worker_blocks(self, worker: Any, events: Any) -> None:
        """Its cache."""


async def meets(worker: Worker, ring: KeyRing | None, seconds: float) -> bool:
    """Whether a router with this ring gets a link to the worker in time."""
    pool = WorkerPool(
        new_incarnation(), times=LinkTimes(0.2, 5.0, 60.0), counter=RouterMetrics("m"), curve=ring
    )
    pool.start(Listener())
    try:
        pool.add(worker.endpoint.removeprefix("tcp://"))
        async with asyncio.timeout(seconds):
            while not pool.workers:
                await pool.wait_change(seconds)
    except TimeoutError:
        return False
    finally:
        await pool.close()
    return True


async def test_a_router_with_a_key_gets_through(worker: Worker, rings: dict[str, KeyRing]) -> None:
    """The worker's key is found among those of both roles."""
    assert await meets(worker, rings["router"], WAIT)


@pytest.mark.parametrize("who", ["nobody", "prefill", "unknown"])
async def test_others_do_not(
    worker: Worker, rings: dict[str, KeyRing], tmp_path: Path, who: str
) -> None:
    """Without keys, with another role's, or with a key that nobody published."""
    stranger = tmp_path / "stranger"
    stranger.mkdir()
    public, secret = zmq.curve_keypair()
    ring = {
        "nobody": None,
        "prefill": rings["prefill"],
        "unknown": KeyRing(public, secret, tmp_path / "peers"),
    }[who]

    assert not await meets(worker, ring, 1.0)
    assert worker.inbox.empty


def test_plain_sockets_do_not_either(worker: Worker) -> None:
    """Neither a greeting without CURVE nor a command after it is read."""
    router = Router(worker.endpoint)
    router.socket.sndtimeo = 500  # a refused handshake ends the pipe: nothing can be sent then
    with suppress(zmq.Again):
        router.say(Hello(PROTOCOL_VERSION))
        router.say(Call(Command(id=1, name=CommandName.DRAIN)))
    assert not router.socket.poll(500)
    router.socket.close()
    assert worker.inbox.empty


async def test_a_rotation_needs_no_restart_of_the_worker(
    worker: Worker, rings: dict[str, KeyRing], tmp_path: Path
) -> None:
    """A router with the next generation is let in as soon as its key is published."""
    newer = write_keys(tmp_path, router=2, decode=2)
    os.utime(tmp_path / "peers", (1, 1))

    assert await meets(worker, newer["router"], WAIT)
    assert await meets(worker, rings["router"], WAIT)


def test_decode_workers_reach_prefill_workers(rings: dict[str, KeyRing]) -> None:
    """The control link stands under CURVE, whichever generation P's process has."""
    p_guard = CurveGuard(rings["prefill"])
    p_guard.start()
    d_guard = _SharedContext(rings["decode"], p_guard)
    config = make_config()
    producer, consumer = Producer(config, guard=p_guard), Consumer(config, guard=d_guard)
    try:
        consumer.meet(producer)
        plain = Consumer(config)
        plain.service.set_peers({producer.service.control: producer.incarnation})
        with pytest.raises((AssertionError, TimeoutError)):
            plain.until(lambda: plain.service.peer_up(producer.incarnation), seconds=1.0)
        plain.service.close()
    finally:
        consumer.service.close()
        producer.service.close()
        p_guard.stop()


@pytest.mark.parametrize(
    ("published", "key"),
    [(("prefill.2.public",), b"abc"), (("prefill.2.public",), b"~" * 40), ((), b"")],
    ids=["short", "no Z85", "none at all"],
)
def test_a_key_that_is_none_costs_its_links_alone_until_it_is_right(
    rings: dict[str, KeyRing], tmp_path: Path, published: tuple[str, ...], key: bytes
) -> None:
    """A rotation that went wrong, or has not begun: the control plane stands, and calls again."""
    p_guard = CurveGuard(rings["prefill"])
    p_guard.start()
    peers, right = tmp_path / "peers", rings["prefill"].public
    (peers / "prefill.1.public").unlink()
    for name in published:
        (peers / name).write_bytes(key)
    d_guard = _SharedContext(
        KeyRing(rings["decode"].public, rings["decode"].secret, peers), p_guard
    )
    config = make_config()
    producer, consumer = Producer(config, guard=p_guard), Consumer(config, guard=d_guard)
    channel = consumer.service._channel
    try:
        consumer.service.set_peers({producer.service.control: producer.incarnation})
        consumer.until(lambda: sum(each.failures for each in channel._producers.values()) > 1)
        assert consumer.service.problem() is None
        (peers / "prefill.3.public").write_bytes(right)
        for name in published:
            (peers / name).write_bytes(right)
        os.utime(peers, (1, 1))
        consumer.until(lambda: consumer.service.peer_up(producer.incarnation))
    finally:
        consumer.service.close()
        producer.service.close()
        p_guard.stop()


@pytest.mark.parametrize(
    ("gives", "takes", "pulls"),
    [
        ("prefill", "prefill", True),
        ("decode", "decode", True),
        ("decode", "prefill", True),
        ("prefill", "prefill", False),
        ("decode", "decode", False),
    ],
)
def test_workers_of_any_role_reach_lenders_of_any_role(
    rings: dict[str, KeyRing], gives: str, takes: str, *, pulls: bool
) -> None:
    """Where prefixes are pulled; else a control socket is for decode workers, and is a prefill
    worker's."""
    p_guard = CurveGuard(rings[gives])
    p_guard.start()
    d_guard = _SharedContext(rings[takes], p_guard)
    config = make_config(kv_pull_peers=int(pulls), kv_connect_seconds=0.3)
    producer, consumer = Producer(config, guard=p_guard), Consumer(config, guard=d_guard)
    try:
        if pulls:
            consumer.meet(producer)
            return
        consumer.service.set_peers({producer.service.control: producer.incarnation})
        with pytest.raises((AssertionError, TimeoutError)):
            consumer.until(lambda: consumer.service.peer_up(producer.incarnation), seconds=1.0)
    finally:
        consumer.service.close()
        producer.service.close()
        p_guard.stop()


def test_a_successor_waits_for_its_predecessors_address(rings: dict[str, KeyRing]) -> None:
    """One answers for a process at a time; the next begins when the first has let go."""
    first, second = CurveGuard(rings["decode"]), CurveGuard(rings["decode"])
    first.start()
    following = threading.Thread(target=second.start)
    following.start()
    following.join(0.3)
    assert following.is_alive()
    first.stop()
    following.join(30)
    assert not following.is_alive()
    second.stop()


class _SharedContext(CurveGuard):
    """Two guards in one process share the context, so one authenticator answers for both."""

    def __init__(self, ring: KeyRing, other: CurveGuard) -> None:
        self.context = other.context
        self._ring = ring
        self._authenticator = other._authenticator
