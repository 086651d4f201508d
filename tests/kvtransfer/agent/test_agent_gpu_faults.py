"""GPUs that fail under an agent, or that it cannot use: it stays, for who needs none of them."""

from __future__ import annotations

import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from tests.kvtransfer.agent.agents import AgentWorker, Running
from tests.kvtransfer.agent.test_agent import linked, read
from tests.kvtransfer.mapped.test_mapped import block, until

from tandem.kvtransfer.errors import TransportError
from tandem.kvtransfer.nodeagent import registrations
from tandem.kvtransfer.nodeagent import registrations as memory
from tandem.kvtransfer.nodeagent.registrations import DeviceRing, DeviceSource, HostRing, Source
from tandem.kvtransfer.transports.agent.line import Line
from tandem.kvtransfer.transports.agent.wire import VERSION, Give, Hello, Rejected, ToWorker
from tandem.kvtransfer.transports.base import Progress, Region
from tandem.kvtransfer.transports.mapped.copiers import Batch, HostCopier, Mark
from tandem.memory import device
from tandem.memory.device import DeviceMemoryError
from tandem.protocol.ids import new_incarnation

GPU = "GPU-1c0ffee0"


def fails(*_: object) -> NoReturn:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def refuses(*_: object, **_more: object) -> NoReturn:
    raise DeviceMemoryError("a copy failed: error 700 of the driver")


def heard(line: Line) -> ToWorker:
    found: list[ToWorker] = []

    def told() -> bool:
        message = line.receive()
        found.extend([] if message is None else [message])
        return bool(found)

    until(told)
    return found[0]


def test_a_producer_of_a_gpu_that_cannot_be_used_is_rejected(
    running: Running,
    folder: Path,
    consumer: AgentWorker,
    producer: AgentWorker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """GPUs are counted without CUDA, and may be there where it cannot begin; others are served."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", fails)
    kv_cache, size = HostCopier().share(producer.kv_cache)
    line = Line(folder)
    assert isinstance(heard(line), Hello)
    line.send_message(
        Give(VERSION, new_incarnation(), b"s" * 32, (size, 4096, 4096), 4096, GPU), [kv_cache] * 3
    )
    answer = heard(line)
    assert isinstance(answer, Rejected)
    assert "cannot use its GPUs: CUDA error" in answer.reason
    line.close()
    os.close(kv_cache)
    assert read(consumer, linked(consumer, producer), block(0, 0)) is Progress.DONE


class Failed:
    """Behind a copy of a GPU that has failed."""

    due = math.inf

    def done(self) -> bool:
        refuses()


def test_a_copy_of_a_gpu_that_has_failed_is_refused(
    running: Running,
    consumer: AgentWorker,
    producer: AgentWorker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And its consumer is sent away, whose landing slots are of that GPU; it may register anew."""
    rings: list[HostRing] = []

    closed: list[HostRing] = []

    class Ring(HostRing):
        def copy(self, source: Source, batch: Batch) -> Mark:
            return Failed() if self is rings[0] else super().copy(source, batch)

        def close(self) -> None:
            closed.append(self)
            super().close()

    def open_ring(_where: str, descriptor: int, size: int) -> HostRing:
        rings.append(Ring(descriptor, size))
        return rings[-1]

    monkeypatch.setattr(registrations, "open_ring", open_ring)
    peer = linked(consumer, producer)
    assert read(consumer, peer, block(0, 0), block(1, 1), block(2, 2)) is Progress.FAILED
    until(lambda: rings[0] in closed)
    counts = running.agent.counts
    assert (counts["copies"], counts["refused: failed"]) == (0, 1)
    assert read(consumer, peer, block(0, 0)) is Progress.DONE
    assert torch.equal(consumer.kv_cache[0], producer.kv_cache[0])
    assert running.agent.status()["under way"] == 0


class Range:
    address = 0
    closed = False

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def ranges(monkeypatch: pytest.MonkeyPatch) -> list[Range]:
    mapped: list[Range] = []

    def map_range(*_: Any, **_more: Any) -> Range:
        mapped.append(Range())
        return mapped[-1]

    monkeypatch.setattr(device, "use_device", lambda _index: None)
    monkeypatch.setattr(device, "map_range", map_range)
    return mapped


@pytest.mark.parametrize("copy", [lambda *_: None, refuses], ids=["marked", "begun"])
def test_a_copy_that_a_failed_gpu_does_not_begin_is_the_transports_fault(
    ranges: list[Range], monkeypatch: pytest.MonkeyPatch, copy: Any
) -> None:
    """So it is refused. Nor can such a GPU be waited for: it copies no more."""
    lane = SimpleNamespace(copy=copy, mark=refuses, wait=fails)
    monkeypatch.setattr(memory, "Lane", lambda _index: lane)
    memory_of, other = os.pipe()
    ring, source = DeviceRing(memory_of, 4096, 0), DeviceSource(memory_of, 4096)
    some = np.zeros(1, dtype=np.int64)
    batch = Batch(Region.BLOCKS, Region.SLOTS, some, some, some + 8, True)
    with pytest.raises(TransportError, match="error 700"):
        ring.copy(source, batch)
    source.close()
    os.close(memory_of)
    os.close(other)


def test_a_ring_without_a_stream_is_not_mapped(
    ranges: list[Range], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "Lane", fails)
    with pytest.raises(TransportError, match="no stream: CUDA error"):
        DeviceRing(0, 4096, 0)
    assert ranges[0].closed
