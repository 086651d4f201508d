"""Two processes over NIXL and tcp: right bytes, and what happens when one dies or hangs."""

import itertools
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import psutil
import pytest
from tests.forked import ONE_THREAD, Forked, fork_server
from tests.kvtransfer.builders import (
    BLOCK,
    NUM_BLOCKS,
    Consumer,
    Producer,
    config_apart,
    make_key,
)
from tests.own_ports import own_ports
from tests.waiting import wait_for

from tandem.base.listening import is_loopback
from tandem.kvtransfer import events
from tandem.protocol.card import blocks_for
from tandem.protocol.errors import FailCause
from tandem.protocol.ids import Incarnation

pytestmark = pytest.mark.full

Process: TypeAlias = subprocess.Popen[str] | Forked
_SCRIPT = Path(__file__).parent / "worker_process.py"
_names = itertools.count()
LOST_SECONDS = 5.0
"""Within which a peer that died or hangs shall be known; a hand-off may wait for far longer."""


def _started(command: list[str]) -> Process:
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **ONE_THREAD},
    )


class Child:
    process: Process

    def __init__(
        self,
        connector: str,
        port: int = 0,
        role: str = "producer",
        isolated: tuple[str, ...] = (),
    ) -> None:
        """``isolated``: a command that starts it; else it is forked of a process that has imported
        torch."""
        words = [role, connector, str(port)]
        if isolated or sys.platform != "linux":
            self.process = _started([*isolated, sys.executable, str(_SCRIPT), *words])
        else:
            self.process = fork_server("handoff").fork(words, os.environ, talks=True)
        self.endpoint, incarnation = self._line().split()
        self.incarnation = Incarnation(bytes.fromhex(incarnation))
        self.port = int(self.endpoint.rpartition(":")[2] or 0) if role == "producer" else 0

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.end()
        assert line, "the producer's process has ended"
        return line

    def tell(self, command: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return self._line().strip()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> None:
        """Kill it, whatever state it is in."""
        self.process.kill()
        self.process.wait(timeout=10)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture(params=["nixl", "tcp", "shm"])
def met(request, workers, children):
    """A child and a consumer whose link is up."""
    child = children(request.param)
    consumer = workers(Consumer, config_apart(kv_connector=request.param))
    meet(consumer, child)
    return child, consumer


def meet(consumer: Consumer, child: Child) -> None:
    consumer.service.set_peers({child.endpoint: child.incarnation})
    consumer.until(lambda: consumer.service.peer_up(child.incarnation))


def miss_soon(consumer: Consumer) -> None:
    """The links that stand: a peer who says nothing for a second is lost."""
    for each in consumer.service._channel._producers.values():
        assert each.link is not None, "the link stands"
        alive = each.link.session.alive
        alive._times = replace(alive._times, beat_timeout=1.0)


def hand_over(child: Child, consumer: Consumer, num_tokens: int = 100) -> str:
    """A whole hand-off; the bytes are right."""
    name = f"r{next(_names)}"
    key, blocks = make_key(name), list(range(blocks_for(num_tokens, BLOCK)))
    consumer.open(key, child.incarnation)
    assert child.tell(f"admit {name} {num_tokens} {consumer.incarnation.hex()}") == "ok"
    half = num_tokens // 2
    child.tell(f"compute {name} {half}")
    consumer.load(key, blocks)
    child.tell(f"compute {name} {num_tokens}")
    child.tell(f"end {name}")
    consumer.wait_for(events.Loaded, key)
    assert consumer.holds(name, num_tokens, blocks)
    return name


@pytest.mark.slow
def test_kv_crosses_processes_while_it_is_computed(met):
    """Chunk by chunk, many requests, the right bytes and every slot and lease free at the end. A
    worker on the loopback listens on no other network."""
    child, consumer = met
    names = [hand_over(child, consumer, 37 + 10 * n) for n in range(8)]
    released = [f"Released:{name}" for name in names]
    wait_for(lambda: child.tell("seen").split()[1:] == released, seen=lambda: child.tell("seen"))
    ring = consumer.service._mover.table.ring
    assert ring.free == len(ring)
    loaded = {"role": "consumer", "outcome": "loaded"}
    consumer.until(lambda: consumer.metric("tandem:kv_handoffs_total", **loaded) == 8)
    listening = [
        each.laddr.ip
        for each in psutil.Process(child.process.pid).net_connections("inet")
        if each.status == psutil.CONN_LISTEN
    ]
    assert listening
    # UCX, left to itself, listens on the machine's own addresses as well.
    assert all(map(is_loopback, listening)), "another machine can ask for KV"


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "during", "after"])
@pytest.mark.parametrize(
    "connector", ["nixl", "shm", pytest.param("tcp", marks=pytest.mark.nightly)]
)
def test_a_killed_producer_fails_its_keys_at_once(workers, children, connector, when):
    """SIGKILL before, during and after the chunks: told at once, nothing loaded, nothing held."""
    child = children(connector)
    consumer = workers(Consumer, config_apart(kv_connector=connector))
    meet(consumer, child)
    name = f"r{next(_names)}"
    key, blocks = make_key(name), list(range(25))
    consumer.open(key, child.incarnation)
    assert child.tell(f"admit {name} 100 {consumer.incarnation.hex()}") == "ok"
    if when != "before":
        child.tell(f"compute {name} 60")
        consumer.load(key, blocks)
    if when == "after":
        child.tell(f"compute {name} 100")
        consumer.until(lambda: consumer.service._mover.table.pulls[key].reached == (100,))
    child.signal(signal.SIGKILL)
    started = time.monotonic()
    failed = consumer.wait_for(events.LoadFailed, key)
    assert failed.cause is FailCause.PEER
    assert time.monotonic() - started < LOST_SECONDS
    ring = consumer.service._mover.table.ring
    consumer.until(lambda: ring.free == len(ring))
    assert not consumer.service.peer_up(child.incarnation)
    assert not consumer.service.has_pending()


@pytest.mark.slow
@pytest.mark.parametrize("connector", ["nixl", "tcp", "shm"])
def test_a_successor_at_the_same_address_serves(workers, children, connector):
    """Killed and started again on the same port: a new incarnation, a new link, right bytes."""
    child = children(connector, own_ports(1)[0])  # nobody takes it between the two
    consumer = workers(Consumer, config_apart(kv_connector=connector))
    meet(consumer, child)
    hand_over(child, consumer)
    child.signal(signal.SIGKILL)
    child.process.wait(timeout=10)
    successor = children(connector, child.port)
    assert successor.incarnation != child.incarnation
    meet(consumer, successor)
    hand_over(successor, consumer)


@pytest.mark.slow
def test_a_stopped_producer_is_lost_by_its_beats_and_comes_back(met):
    """SIGSTOP in the middle: failed when the beats stay out, no slot is reused while its read may
    land, and after SIGCONT the link is made again and delivers."""
    child, consumer = met
    hand_over(child, consumer)
    name = f"r{next(_names)}"
    key = make_key(name)
    consumer.open(key, child.incarnation)
    assert child.tell(f"admit {name} 100 {consumer.incarnation.hex()}") == "ok"
    child.tell(f"compute {name} 60")
    consumer.wait_for(events.Ready, key)
    child.signal(signal.SIGSTOP)
    miss_soon(consumer)
    try:
        consumer.load(key, list(range(25)))
        started = time.monotonic()
        assert consumer.wait_for(events.LoadFailed, key).cause is FailCause.PEER
        assert time.monotonic() - started < LOST_SECONDS
    finally:
        child.signal(signal.SIGCONT)
    ring = consumer.service._mover.table.ring
    consumer.until(lambda: ring.free == len(ring))
    consumer.until(lambda: consumer.service.peer_up(child.incarnation))
    hand_over(child, consumer)
    assert len(consumer.kv_cache) == NUM_BLOCKS


@pytest.mark.slow
def test_a_killed_consumer_costs_the_producer_nothing(workers, children):
    """SIGKILL of D while it loads: P hears of the closed connection with its next beat; slots and
    blocks are free again."""
    config = config_apart(kv_connector="nixl")
    producer = workers(Producer, config)
    child = children("nixl", 0, "consumer")
    child.tell(f"meet {producer.service.control} {producer.incarnation.hex()}")
    key = make_key(f"r{next(_names)}")
    child.tell(f"open {key.request} {producer.incarnation.hex()}")
    assert producer.admit(key, 160, child.incarnation) is None
    producer.compute(key, 80, list(range(40)))
    child.tell(f"load {key.request}")
    table = producer.service._mover.table
    producer.until(lambda: table.exports[key].packed == (80,))
    child.signal(signal.SIGKILL)
    started = time.monotonic()
    producer.wait_for(events.LoadFailed, key)
    assert time.monotonic() - started < LOST_SECONDS
    producer.end(key)
    producer.wait_for(events.Released, key)
    producer.until(lambda: table.ring.free == len(table.ring))
    assert producer.service.consumers() == frozenset()
