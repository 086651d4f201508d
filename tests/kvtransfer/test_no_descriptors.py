"""Processes that have no descriptor left: what cannot be called is a way less; no thread ends."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import pytest
from tests.kvtransfer.agent.agents import AgentWorker
from tests.kvtransfer.builders import Consumer, Producer, make_config
from tests.kvtransfer.descriptors import of_memory
from tests.kvtransfer.test_falls import Pair

from tandem.kvtransfer.errors import NoAgentYet, TransportError
from tandem.kvtransfer.nodeagent.registrations import Producer as Registered
from tandem.kvtransfer.transports.agent import line
from tandem.kvtransfer.transports.agent.wire import VERSION, Give
from tandem.kvtransfer.transports.mapped import taking
from tandem.kvtransfer.transports.mapped.copiers import HostCopier
from tandem.memory.shared import SharedMemory, shared_tensor
from tandem.protocol.ids import new_incarnation


def none_left(*_args: object, **_more: object) -> NoReturn:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


class Sockets(ModuleType):
    """The module ``socket`` of a process that has no descriptor left while ``full``."""

    def __init__(self) -> None:
        super().__init__("socket")
        self.full = True
        self.asked = 0

    def __getattr__(self, name: str) -> object:
        return getattr(socket, name)

    def socket(self, *args: int) -> socket.socket:
        """A socket, if there is a descriptor for it."""
        self.asked += 1
        if self.full:
            none_left()
        return socket.socket(*args)


@pytest.fixture
def sockets(monkeypatch: pytest.MonkeyPatch) -> Sockets:
    """Of those who call a peer of their machine, or its agent."""
    made = Sockets()
    monkeypatch.setattr(taking, "socket", made)
    monkeypatch.setattr(line, "socket", made)
    return made


def test_a_peer_that_cannot_be_called_is_read_by_the_next_way(workers, folder, sockets):
    """Its link is met as every other; the transfer thread goes on."""
    pair = Pair(workers, folder, folder)
    assert sockets.asked
    assert pair.consumer.service.ended() is None
    assert pair.transport in ("nixl", "tcp")
    pair.hand_over("by the next")


def test_the_agent_is_called_again_when_there_are_descriptors(workers, node, sockets):
    """By D, whose link comes back to it, and by P, whose thread registers still."""
    folder = node.agent.path.parent
    pair = Pair(workers, folder, folder, kv_node_copy="agent", kv_quarantine_seconds=0.2)
    assert pair.transport in ("nixl", "tcp")
    assert pair.consumer.service.ended() is None
    giver = pair.producer.service._mover.parts.transports["shm_agent"]._giver
    assert not giver.registered.is_set()
    sockets.full = False
    assert giver.registered.wait(10.0)
    pair.consumer.until(lambda: pair.transport == "shm_agent")
    pair.hand_over("by the agent")


def test_landing_slots_that_cannot_be_shared_are_no_way(workers, node, monkeypatch):
    """D's own half, as an agent says hello."""
    folder = str(node.agent.path.parent)
    made = {"kv_connector": "auto", "kv_node_folder": folder, "kv_node_copy": "agent"}
    producer = workers(Producer, make_config(**made))
    consumer = workers(Consumer, make_config(**made))
    monkeypatch.setattr(SharedMemory, "share", none_left)
    consumer.meet(producer)
    assert consumer.service.ended() is None
    assert consumer.service.peer_health()[0].transport in ("nixl", "tcp")


def test_what_has_no_descriptor_says_so(folder: Path, sockets):
    """By the error that those who choose ways go by; nothing is left open."""
    with pytest.raises(NoAgentYet, match="Too many open files"):
        line.Line(folder)
    memory, before = shared_tensor(4096), of_memory()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SharedMemory, "share", none_left)
        with pytest.raises(TransportError, match="Too many open files"):
            HostCopier().share(memory)
        patch.setattr(SharedMemory, "map", none_left)
        with pytest.raises(OSError, match="Too many open files"):
            shared_tensor(4096)
        patch.setattr(os, "ftruncate", none_left)
        with pytest.raises(OSError, match="Too many open files"):
            SharedMemory.make(4096)
    assert of_memory() <= before


def test_an_agent_keeps_nothing_of_a_producer_that_it_has_no_descriptors_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    """Who registers again every two seconds would cost it those that others give back."""
    worker = AgentWorker(folder, 0)
    kv_cache, size = HostCopier().share(worker.kv_cache)
    slots, room = HostCopier().share(worker.slots.rows)
    before, dup, asked = of_memory(), os.dup, []

    def first_only(descriptor: int) -> int:
        asked.append(descriptor)
        if len(asked) > 1:
            none_left()
        return dup(descriptor)

    monkeypatch.setattr(os, "dup", first_only)
    said = Give(VERSION, new_incarnation(), b"s" * 32, (size, room, room), 4096, "host")
    with pytest.raises(OSError, match="Too many open files"):
        Registered(said, [kv_cache, slots, slots])
    assert len(asked) == 2
    assert of_memory() <= before
    for each in (kv_cache, slots):
        os.close(each)
