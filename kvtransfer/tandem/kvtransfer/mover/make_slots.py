"""Choice of the memory for a worker's slots: the KV cache's GPU if every transport can reach it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.kvtransfer.config import KVTransferConfig
from tandem.kvtransfer.errors import TransportError
from tandem.kvtransfer.memory.slots import (
    SharedSlots,
    SlotMemory,
    SlotSizes,
    slot_bytes_for,
    slot_sizes,
)
from tandem.kvtransfer.transports.base import Region, Traits, Transport
from tandem.memory.device import DeviceFullError, DeviceMemoryError

logger = logging.getLogger(__name__)


def sized_slots(
    config: KVTransferConfig,
    count: int,
    kv_cache: Tensor,
    traits: Iterable[Traits],
    *,
    spare: int = 0,
) -> tuple[SlotMemory, SlotSizes]:
    """Return ``count`` slots and ``spare`` more for the blocks of ``kv_cache`` (uint8 [blocks,
    block_bytes]), sized by settings and device. Raises TransportError if there is no room."""
    near = lies_near(kv_cache, traits := tuple(traits))
    total = torch.cuda.get_device_properties(kv_cache.device).total_memory if near else None
    staged = kv_cache.is_cuda and not near
    sizes = slot_sizes(config, kv_cache.shape[1], count=count, gpu_bytes=total, staged=staged)
    try:
        return make_slots(count + spare, sizes.slot_bytes, kv_cache, traits), sizes
    except (torch.OutOfMemoryError, DeviceFullError) as error:
        mib = (count + spare) * sizes.slot_bytes >> 20
        text = f"no room for {count + spare} slots, {mib} MiB of GPU memory"
        lower = "lower --kv-send-slots, --kv-receive-slots or --gpu-memory-utilization"
        raise TransportError(f"{text}: {lower}") from error


@dataclass(frozen=True, slots=True)
class Slots:
    """A worker's slots: for parts, and for patterns only."""

    memory: SlotMemory
    """Slots of transports that move parts through slots; also of patterns, if there are none."""
    patterns: SlotMemory
    """Small slots for patterns, of transports that copy blocks."""
    sizes: SlotSizes

    def of(self, traits: Traits) -> SlotMemory:
        return self.patterns if traits.lands_in is Region.BLOCKS else self.memory


def slots_for(
    config: KVTransferConfig,
    count: int,
    kv_cache: Tensor,
    transports: dict[str, Transport],
    *,
    spare: int = 0,
) -> Slots:
    """Return ``make_all_slots`` for these transports by name. Those that cannot map the device's
    memory are removed and logged. Raises TransportError if none is left, or no room."""
    try:
        return make_all_slots(config, count, kv_cache, _traits(transports), spare=spare)
    except DeviceFullError as error:
        text = f"no room for patterns of KV ({error}): lower --gpu-memory-utilization"
        raise TransportError(text) from error
    except DeviceMemoryError as error:
        mapping = [name for name, each in transports.items() if each.traits.maps_memory]
        if len(mapping) == len(transports):
            raise TransportError(f"KV cannot go by {', '.join(mapping)}: {error}") from error
        for name in mapping:
            logger.warning("KV does not go by %s: %s", name, error)
            transports.pop(name).stop()
    return make_all_slots(config, count, kv_cache, _traits(transports), spare=spare)


def _traits(transports: dict[str, Transport]) -> list[Traits]:
    return [each.traits for each in transports.values()]


def make_all_slots(
    config: KVTransferConfig,
    count: int,
    kv_cache: Tensor,
    traits: Iterable[Traits],
    *,
    spare: int = 0,
) -> Slots:
    """Return ``count`` slots and ``spare`` more for the blocks of ``kv_cache`` (uint8 [blocks,
    block_bytes]), as these transports need. Raises TransportError if there is no room."""
    through = [each for each in traits if each.lands_in is Region.SLOTS]
    direct = [each for each in traits if each.lands_in is Region.BLOCKS]
    patterns = None
    if direct:
        size = slot_bytes_for(config.kv_probe_bytes, 0)
        patterns = make_slots(count + spare, size, kv_cache, direct)
    if through or patterns is None:
        memory, sizes = sized_slots(config, count, kv_cache, through, spare=spare)
    else:
        memory, sizes = patterns, SlotSizes(patterns.slot_bytes, 1)
    return Slots(memory, memory if patterns is None else patterns, sizes)


def lies_near(kv_cache: Tensor, traits: Iterable[Traits]) -> bool:
    """Return whether slots for this KV cache are in GPU memory, next to it."""
    return kv_cache.is_cuda and all(each.moves_gpu_memory for each in traits)


def make_slots(
    count: int, slot_bytes: int, kv_cache: Tensor, traits: Sequence[Traits]
) -> SlotMemory:
    """Return slots for the blocks of ``kv_cache`` that all these transports can move."""
    shared = any(each.maps_memory for each in traits)
    if kv_cache.is_cuda:
        from tandem.kvtransfer.memory import device_slots

        if shared:
            return device_slots.MappedSlots(count, slot_bytes, kv_cache)
        if lies_near(kv_cache, traits):
            return device_slots.DeviceSlots(count, slot_bytes, kv_cache)
        return device_slots.HostSlotsOfDevice(count, slot_bytes, kv_cache)
    return SharedSlots(count, slot_bytes) if shared else SlotMemory(count, slot_bytes)
