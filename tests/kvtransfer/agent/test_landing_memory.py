"""Landing slots stay mapped under a consumer's own copies out of them, whatever became of the
agent: a GPU's source is an address, and keeps nothing."""

from __future__ import annotations

import ctypes
import gc
import math
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.kvtransfer.agent.agents import AgentWorker, Held, Running
from tests.kvtransfer.agent.test_agent import linked, moved
from tests.kvtransfer.mapped.test_mapped import block, ended, until
from torch import Tensor

from tandem.kvtransfer.transports.agent import transport as agent_transport
from tandem.kvtransfer.transports.base import Progress
from tandem.kvtransfer.transports.mapped.copiers import Batch, HostCopier, Source


class Address:
    def __init__(self, memory: Tensor) -> None:
        self.size, self.at = memory.numel(), memory.data_ptr()

    def close(self) -> None:
        """See Source."""


class Late:
    """Behind copies that are through when they are told to be."""

    due = math.inf

    def __init__(self, copier: Behind) -> None:
        self._copier = copier

    def done(self) -> bool:
        if self._copier.through:
            while self._copier.begun:
                self._copier.begun.pop(0)()
        return self._copier.through


class Behind(HostCopier):
    """Copies end when the test says so, and read an address, as a stream of a GPU does."""

    def __init__(self) -> None:
        self.through = False
        self.begun: list[Callable[[], object]] = []

    def make(self, size: int) -> tuple[Tensor, Source]:
        memory, _ = super().make(size)
        return memory, Address(memory)

    def copy(self, target: Tensor, source: Source, batch: Batch) -> None:
        assert isinstance(source, Address)
        here, there = target.data_ptr(), source.at
        for offset, at, nbytes in zip(batch.targets, batch.sources, batch.sizes, strict=True):
            ranges = here + int(offset), there + int(at), int(nbytes)
            self.begun.append(partial(ctypes.memmove, *ranges))

    def mark(self) -> Late:
        return Late(self)


@pytest.fixture
def copier() -> Behind:
    return Behind()


@pytest.fixture
def consumer(folder: Path, copier: Behind) -> Iterator[AgentWorker]:
    made = AgentWorker(folder, 0, copier=copier)
    made.transport.receive(made.slots, made.blocks)
    yield made
    copier.begun.clear()  # of a test that failed: its memory may be gone
    copier.through = True
    made.transport.stop()


def taking(consumer: AgentWorker, copier: Behind) -> weakref.ref[Tensor]:
    """A copy out of a landing slot is under way: the slots' memory."""
    until(lambda: moved(consumer) and bool(copier.begun))
    memory = consumer.transport._asker.memory
    assert memory is not None
    return weakref.ref(memory)


def is_mapped(memory: weakref.ref[Tensor]) -> bool:
    gc.collect()
    return memory() is not None


def test_an_agent_that_ends_takes_no_memory_from_under_a_copy(
    folder: Path, consumer: AgentWorker, producer: AgentWorker, copier: Behind
) -> None:
    """Its last answer has come: what it brought is copied on, and then the slots are let go of."""
    running = Running(folder)
    peer = linked(consumer, producer)
    ticket = consumer.transport.read(peer, [block(0, 0)])
    memory = taking(consumer, copier)
    running.stop()
    until(lambda: moved(consumer) and not consumer.transport._asker.connected)
    assert is_mapped(memory)
    assert consumer.transport.poll(ticket) is Progress.PENDING
    copier.through = True
    assert ended(consumer.transport, ticket) is Progress.DONE
    assert torch.equal(consumer.kv_cache[0], producer.kv_cache[0])
    assert not is_mapped(memory)


def test_slots_that_no_link_needs_are_let_go_of(
    running: Running, consumer: AgentWorker, producer: AgentWorker, copier: Behind
) -> None:
    """A link that fell to the agent goes back to mapping: a GiB of each GPU stayed with the agent
    until the worker slept or ended. What is copied out of them keeps them so long."""
    peer, card = producer.incarnation, producer.serve()
    consumer.transport.connect(peer, "127.0.0.1", card)
    ticket = consumer.transport.read(peer, [block(0, 0)])
    memory = taking(consumer, copier)
    consumer.transport.close(peer)
    assert consumer.transport.held_bytes > 0
    copier.through = True
    assert ended(consumer.transport, ticket) is Progress.FAILED
    assert consumer.transport.held_bytes == 0
    assert not is_mapped(memory)
    consumer.transport.connect(peer, "127.0.0.1", card)
    again = consumer.transport.read(peer, [block(0, 1)])
    assert ended(consumer.transport, again) is Progress.DONE
    consumer.transport.close(peer)
    assert consumer.transport.held_bytes == 0


def test_slots_that_no_link_needs_wait_for_what_the_agent_owes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, consumer: AgentWorker, producer: AgentWorker
) -> None:
    """A link that is lost in a copy may be made again at once; else they go behind the answer."""
    held, running = Held(monkeypatch), Running(folder)
    peer = linked(consumer, producer)
    ticket = consumer.transport.read(peer, [block(0, 0)])
    until(lambda: moved(consumer) and held.begun == 1)
    consumer.transport.close(peer)
    assert consumer.transport.poll(ticket) is Progress.FAILED
    consumer.transport.look()
    assert consumer.transport.held_bytes > 0
    held.through = True

    def gone() -> bool:
        consumer.transport.look()
        return consumer.transport.held_bytes == 0

    until(gone)
    running.stop()


def test_a_transport_that_stops_waits_with_the_memory(
    running: Running,
    monkeypatch: pytest.MonkeyPatch,
    consumer: AgentWorker,
    producer: AgentWorker,
    copier: Behind,
) -> None:
    """It leaves the agent first, and then waits for its own copies; one that does not end keeps
    the slots."""
    monkeypatch.setattr(agent_transport, "STOP_SECONDS", 0.05)
    peer = linked(consumer, producer)
    consumer.transport.read(peer, [block(0, 0)])
    memory = taking(consumer, copier)
    consumer.transport.stop()
    assert is_mapped(memory)
    copier.through = True
    consumer.transport.stop()
    assert torch.equal(consumer.kv_cache[0], producer.kv_cache[0])
    assert not is_mapped(memory)
