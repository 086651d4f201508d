"""Which memory a worker's slots take: the GPU where the slab is and every transport can reach it.

Then KV never passes through the host. Called by the producer and the consumer when they start.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from tandem.kvtransfer.mover.memory import SlotMemory
from tandem.kvtransfer.transports.base import Traits


def make_slots(count: int, slot_bytes: int, slab: Tensor, traits: Iterable[Traits]) -> SlotMemory:
    """Slots for the blocks of ``slab`` that all these transports can move."""
    if slab.is_cuda:
        from tandem.kvtransfer.mover import device_slots

        if all(each.moves_gpu_memory for each in traits):
            return device_slots.DeviceSlots(count, slot_bytes, slab)
        return device_slots.HostSlotsOfDevice(count, slot_bytes, slab)
    return SlotMemory(count, slot_bytes)
