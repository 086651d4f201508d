"""Slots in a GPU's memory, and slots on the host for blocks on a GPU."""

import pytest
import torch

from tandem.kernels.blocks import digest
from tandem.kvtransfer.memory.header import HEADER_BYTES
from tandem.kvtransfer.memory.sizes import slot_bytes_for
from tandem.kvtransfer.memory.slots import SlotMemory
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
    """Random blocks on the GPU."""
    return torch.randint(0, 256, (blocks, BLOCK), dtype=torch.uint8, device="cuda")


def test_slots_are_where_every_transport_reaches_them():
    """On the GPU unless one of the transports moves host memory alone."""
    slab = slab_of(4)
    assert make_slots(2, 1 << 20, slab, [NEAR]).gpu == 0
    assert make_slots(2, 1 << 20, slab, [NEAR, FAR]).gpu is None
    assert type(make_slots(2, 1 << 20, slab.cpu(), [NEAR])) is SlotMemory


@pytest.mark.parametrize("traits", [NEAR, FAR], ids=["on the GPU", "on the host"])
def test_blocks_pass_through_a_slot(traits):
    """Packed blocks have the digest of their bytes, and land where they are unpacked to."""
    slab = slab_of(16)
    before = slab.clone()
    slots = make_slots(3, slot_bytes_for(0, 4 * BLOCK), slab, [traits])
    assert torch.equal(slab, before)
    found = slots.pack(slab, [3, 11, 5], 1)
    assert found == digest(before[[3, 11, 5]].cpu().contiguous())
    assert slots.digest(1, HEADER_BYTES + 3 * BLOCK) == found
    slots.unpack(1, [0, 7, 15], slab)
    before[[0, 7, 15]] = before[[3, 11, 5]]
    assert torch.equal(slab, before)


@pytest.mark.parametrize("traits", [NEAR, FAR], ids=["on the GPU", "on the host"])
def test_headers_are_written_and_read(traits):
    """And leave the payload alone."""
    slab = slab_of(4)
    slots = make_slots(2, slot_bytes_for(0, BLOCK), slab, [traits])
    found = slots.pack(slab, [2], 1)
    slots.write(1, b"header" * 20)
    assert slots.read(1, 120) == b"header" * 20
    assert slots.digest(1, HEADER_BYTES + BLOCK) == found
