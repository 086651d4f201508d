"""Slots in a GPU's memory, and slots on the host for blocks on a GPU."""

from collections.abc import Sequence
from functools import partial

import pytest
import torch
from tests.waiting import wait_for

from tandem.kernels.blocks import digest
from tandem.kvtransfer.memory.packing import HEADER_BYTES, NOBODYS, read_header
from tandem.kvtransfer.memory.slots import Move, SlotMemory, slot_bytes_for
from tandem.kvtransfer.mover.make_slots import make_slots
from tandem.kvtransfer.transports.base import Traits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
BLOCK = 96 << 10
NEAR = Traits(name="nixl", needs_advance=True, moves_gpu_memory=True)
FAR = Traits(name="tcp", needs_advance=False)


def slab_of(blocks: int) -> torch.Tensor:
    return torch.randint(0, 256, (blocks, BLOCK), dtype=torch.uint8, device="cuda")


def all_done(moves: Sequence[Move]) -> bool:
    return all(each.done() for each in moves)


def test_slots_are_where_every_transport_reaches_them():
    """On the GPU unless one of the transports moves host memory alone."""
    kv_cache = slab_of(4)
    assert make_slots(2, 1 << 20, kv_cache, [NEAR]).gpu == 0
    assert make_slots(2, 1 << 20, kv_cache, [NEAR, FAR]).gpu is None
    assert type(make_slots(2, 1 << 20, kv_cache.cpu(), [NEAR])) is SlotMemory


@pytest.mark.parametrize("traits", [NEAR, FAR], ids=["on the GPU", "on the host"])
def test_blocks_pass_through_a_slot(traits):
    """Packed blocks have the digest of their bytes, and land where they are unpacked to."""
    kv_cache = slab_of(16)
    before = kv_cache.clone()
    slots = make_slots(3, slot_bytes_for(0, 4 * BLOCK), kv_cache, [traits])
    assert torch.equal(kv_cache, before)
    packed = slots.pack(kv_cache, [3, 11, 5], 1, NOBODYS._replace(part=7))
    assert slots.settle(10.0)
    assert packed.done()  # which is when a slot on the host gets the fields of its header
    inspected = slots.inspect(1, HEADER_BYTES + 3 * BLOCK)
    slots.unpack(1, [0, 7, 15], kv_cache)
    assert slots.settle(10.0)
    assert inspected.done()
    header, found = read_header(inspected.found().header), inspected.found().digest
    assert header.part == 7
    assert header.digest == found == digest(before[[3, 11, 5]].cpu().contiguous())
    before[[0, 7, 15]] = before[[3, 11, 5]]
    assert torch.equal(kv_cache, before)


@pytest.mark.parametrize("traits", [NEAR, FAR], ids=["on the GPU", "on the host"])
def test_parts_are_queued_behind_each_other(traits):
    """All slots at once, more than once: each part has the digest of its own bytes."""
    kv_cache, of = slab_of(32), list(range(4))
    slots = make_slots(4, slot_bytes_for(0, 4 * BLOCK), kv_cache, [traits])
    for turn in range(3):
        filled = [
            slots.pack(kv_cache, [4 * slot + turn, 17 + slot], slot, NOBODYS._replace(part=slot))
            for slot in of
        ]
        wait_for(partial(all_done, filled))
        want = [kv_cache[[4 * slot + turn, 17 + slot]].cpu() for slot in of]
        seen = [slots.inspect(slot, HEADER_BYTES + 2 * BLOCK) for slot in of]
        moved = [slots.unpack(slot, [24 + slot, 28 + slot], kv_cache) for slot in of]
        wait_for(partial(all_done, [*seen, *moved]))
        for slot in of:
            header = read_header(seen[slot].found().header)
            assert header.part == slot
            assert header.digest == seen[slot].found().digest == digest(want[slot])
            assert torch.equal(kv_cache[[24 + slot, 28 + slot]].cpu(), want[slot])


@pytest.mark.parametrize("traits", [NEAR, FAR], ids=["on the GPU", "on the host"])
def test_the_start_of_a_slot_is_written_and_read(traits):
    """Patterns of probes go that way."""
    slots = make_slots(2, slot_bytes_for(0, BLOCK), slab_of(4), [traits])
    slots.write(1, b"header" * 20)
    assert slots.read(1, 120) == b"header" * 20
    assert slots.read(0, HEADER_BYTES) == bytes(HEADER_BYTES)
