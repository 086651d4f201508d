"""Devices that have no memory which other processes can map: ways that need none are used."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
from tests.kvtransfer.builders import Consumer, Producer, make_key
from tests.kvtransfer.memory_transport import MemoryTransport

from tandem.kvtransfer import events
from tandem.kvtransfer.errors import TransportError
from tandem.kvtransfer.mover import make_slots
from tandem.memory.device import DeviceFullError, DeviceMemoryError

KEY = make_key("one")


class Mapping(MemoryTransport):
    def __init__(self) -> None:
        super().__init__(direct=True)
        self.traits = replace(self.traits, maps_memory=True)
        self.stops = 0

    def stop(self) -> None:
        self.stops += 1
        super().stop()


def refuse(monkeypatch: pytest.MonkeyPatch, error: DeviceMemoryError) -> None:
    """No memory that others can map is given."""
    made = make_slots.make_slots

    def make(count: int, slot_bytes: int, kv_cache: Any, traits: Any) -> Any:
        if any(each.maps_memory for each in traits):
            raise error
        return made(count, slot_bytes, kv_cache, traits)

    monkeypatch.setattr(make_slots, "make_slots", make)


@pytest.fixture(autouse=True)
def lacking(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, DeviceMemoryError("cuMemCreate failed: CUDA_ERROR_NOT_SUPPORTED"))


def test_kv_goes_by_another_way_and_the_log_says_so(workers, caplog):
    """A worker of either role did not start, though another way had loaded."""
    mapping = [Mapping(), Mapping()]
    ways = [{"cuda_p2p": each, "memory": MemoryTransport()} for each in mapping]
    with caplog.at_level(logging.WARNING):
        producer = workers(Producer, transports=ways[0])
        consumer = workers(Consumer, transports=ways[1])
    assert [list(each) for each in ways] == [["memory"], ["memory"]]
    assert [each.stops for each in mapping] == [1, 1]
    said = "KV does not go by cuda_p2p: cuMemCreate failed"
    assert caplog.text.count(said) == 2
    consumer.meet(producer)
    consumer.open(KEY, producer.incarnation)
    producer.hand_over(KEY, 8, [0, 1], consumer.incarnation)
    consumer.load(KEY, [4, 5])
    consumer.wait_for(events.Loaded, KEY)
    assert consumer.holds("one", 8, [4, 5])


@pytest.mark.parametrize("kind", [Producer, Consumer])
def test_a_worker_without_another_way_says_why_it_cannot_start(workers, kind):
    with pytest.raises(TransportError, match="by cuda_p2p: cuMemCreate failed"):
        workers(kind, transports={"cuda_p2p": Mapping()})


@pytest.mark.parametrize("kind", [Producer, Consumer])
def test_a_device_that_is_full_is_no_reason_for_another_way(workers, kind, monkeypatch):
    """KV went by a slow one for a worker's whole life."""
    refuse(monkeypatch, DeviceFullError("cuMemCreate failed: CUDA_ERROR_OUT_OF_MEMORY"))
    ways = {"cuda_p2p": Mapping(), "memory": MemoryTransport()}
    with pytest.raises(TransportError, match="no room for patterns"):
        workers(kind, transports=ways)
    assert list(ways) == ["cuda_p2p", "memory"]
