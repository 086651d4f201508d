"""Links that were met while the node's agent was away, ended, or was another: they get it later."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.kvtransfer.agent.agents import AgentWorker, Running
from tests.kvtransfer.builders import Consumer, Producer
from tests.kvtransfer.test_falls import Pair, made

from tandem.kvtransfer.errors import NoAgentYet, TransportError
from tandem.kvtransfer.transports.agent import landing, wire
from tandem.kvtransfer.transports.agent import landing as asking
from tandem.protocol.ids import Incarnation

SOON = {"kv_node_copy": "agent", "kv_quarantine_seconds": 0.1}


class StandIn:
    """Sits at the agent's place, says ``words`` to who calls and, unless it ``stays``, leaves."""

    def __init__(self, folder: Path, *words: object, stays: bool = False) -> None:
        self._words, self._stays = words, stays
        self._path = folder / wire.SOCKET_NAME
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sock.bind(str(self._path))
        self._sock.listen(64)
        self._callers: list[socket.socket] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                caller, _ = self._sock.accept()
            except OSError:
                return
            self._callers.append(caller)
            with contextlib.suppress(BrokenPipeError):  # it only wanted a word
                for word in self._words:
                    caller.send(wire.encode(word))
            if not self._stays:
                caller.close()

    def stop(self) -> None:
        """It ends, and its place is free."""
        self._sock.shutdown(socket.SHUT_RDWR)
        self._thread.join(10.0)
        for each in (self._sock, *self._callers):
            each.close()
        self._path.unlink()


@pytest.fixture(autouse=True)
def _call_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Producers look for an agent again soon."""
    monkeypatch.setattr(landing, "LONGEST_PAUSE_SECONDS", landing.FIRST_PAUSE_SECONDS)


def way_to(consumer: Consumer, peer: Incarnation) -> str:
    """By which its KV comes; empty while its link is down."""
    found = [each for each in consumer.service.peer_health() if each.peer == peer]
    return found[0].transport if found and found[0].up else ""


def test_a_producer_that_is_met_while_the_agent_is_away_gets_it(workers, folder):
    """The line to the agent had been there, and nothing had been read by it since it ended: the
    link of the second producer went another way for as long as it stood."""
    first = Running(folder)
    pair = Pair(workers, folder, folder, **SOON)
    assert pair.transport == "shm_agent"
    first.stop()
    late, consumer = made(workers, Producer, folder, **SOON), pair.consumer
    both = {each.service.control: each.incarnation for each in (pair.producer, late)}
    consumer.service.set_peers(both)
    consumer.until(lambda: way_to(consumer, late.incarnation) in ("nixl", "tcp"))
    second = Running(folder)
    consumer.until(lambda: way_to(consumer, late.incarnation) == "shm_agent")
    second.stop()


@pytest.mark.parametrize(
    ("words", "stays"),
    [
        ((wire.Hello(wire.VERSION),), False),
        ((wire.Hello(wire.VERSION),), True),
    ],
    ids=["ends", "says nothing"],
)
def test_an_agent_that_fails_the_first_probe_may_be_replaced(workers, folder, words, stays):
    """As where the DaemonSet is upgraded: the pattern did not come, and that way was forgotten."""
    stand_in = StandIn(folder, *words, stays=stays)
    pair = Pair(workers, folder, folder, kv_connect_seconds=0.5, **SOON)
    pair.consumer.until(lambda: pair.transport in ("nixl", "tcp"))
    stand_in.stop()
    running = Running(folder)
    pair.consumer.until(lambda: pair.transport == "shm_agent")
    running.stop()


def test_an_agent_that_ended_unnoticed_is_none_to_who_connects(
    folder: Path, consumer: AgentWorker, producer: AgentWorker
) -> None:
    """No probe is spent on finding it out."""
    first = Running(folder)
    transport, peer, card = consumer.transport, producer.incarnation, producer.serve()
    transport.connect(peer, "", card)
    first.stop()
    with pytest.raises(NoAgentYet):
        transport.connect(peer, "", card)


def test_one_that_is_not_trusted_sits_at_a_place_that_may_be_taken_back(
    folder: Path, consumer: AgentWorker, monkeypatch: pytest.MonkeyPatch
) -> None:

    def strange(_folder: Path) -> Callable[[], None]:
        raise TransportError("it is user 65534's")

    monkeypatch.setattr(asking, "Line", strange)
    with pytest.raises(NoAgentYet, match="65534"):
        consumer.transport._asker.connect()
