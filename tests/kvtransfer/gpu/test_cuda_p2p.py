"""cuda_p2p between processes that share a GPU: right bytes, and memory that is let go of."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
from tests.kvtransfer.builders import BLOCK, GPU_RANGE, Consumer, make_config, make_key
from tests.kvtransfer.test_processes import Child, hand_over, meet

from tandem.kvtransfer import events
from tandem.memory.device import DeviceMemoryError, MappedAllocator, descriptor_of, map_range
from tandem.protocol.card import blocks_for
from tandem.protocol.errors import FailCause

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.fixture
def met():
    """A producer in a child, and a consumer here, linked."""
    child = Child("cuda_p2p")
    consumer = Consumer(make_config(kv_connector="cuda_p2p", kv_beat_timeout=4.0))
    meet(consumer, child)
    yield child, consumer
    consumer.service.close()
    child.end()


def test_kv_crosses_processes_while_it_is_computed(met):
    """Chunk by chunk, many requests, the right bytes; nothing was packed."""
    child, consumer = met
    for number in range(8):
        hand_over(child, consumer, 37 + 10 * number)
    loaded = {"role": "consumer", "outcome": "loaded"}
    consumer.until(lambda: consumer.metric("tandem:kv_handoffs_total", **loaded) == 8)
    ring = consumer.service._mover.table.ring
    assert ring.free == len(ring)


def test_a_killed_producers_memory_is_free_within_two_seconds(met):
    """The driver keeps memory that is mapped anywhere: D lets go of it as soon as the link is."""
    child, consumer = met
    hand_over(child, consumer, 100)
    key = make_key("r-killed")
    consumer.open(key, child.incarnation)
    assert child.tell(f"admit r-killed 100 {consumer.incarnation.hex()}") == "ok"
    child.tell("compute r-killed 60")
    consumer.load(key, list(range(blocks_for(100, BLOCK))))
    before = torch.cuda.mem_get_info()[0]
    child.signal(signal.SIGKILL)
    started = time.monotonic()
    assert consumer.wait_for(events.LoadFailed, key).cause is FailCause.PEER
    consumer.until(lambda: torch.cuda.mem_get_info()[0] >= before + GPU_RANGE)
    seconds = time.monotonic() - started
    print(f"free after {seconds:.2f} s")
    assert seconds < 2.0
    assert not consumer.service.peer_up(child.incarnation)


def test_a_range_is_mapped_to_be_read_and_no_longer_than_wanted():
    """What is no descriptor of GPU memory is refused; a mapped range has its size."""
    memory = MappedAllocator(torch.device("cuda"))(5 << 20)
    descriptor, size = descriptor_of(memory)
    try:
        mapped = map_range(descriptor, size, 0)
        assert mapped.size == size == memory.numel()
        mapped.close()
        mapped.close()
        part = map_range(descriptor, size - 1, 0)
        assert part.size == size, "of the last grain all is mapped"
        part.close()
        with pytest.raises(DeviceMemoryError):
            descriptor_of(memory[1 << 20 :])
        with pytest.raises(DeviceMemoryError):
            descriptor_of(torch.zeros(1 << 20, device="cuda"))
        with open(os.devnull) as null, pytest.raises(DeviceMemoryError):
            map_range(null.fileno(), size, 0)
    finally:
        os.close(descriptor)
