"""Number and size of a consumer's landing slots."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.kvtransfer.config import KVTransferConfig
from tandem.kvtransfer.memory.slots import slot_bytes_for, slot_sizes
from tandem.kvtransfer.transports.agent.wire import MAX_RING_BYTES, MAX_SLOTS

GPU_FACTOR = 2
"""Receive slots per landing slot on a GPU; larger pieces cost less time."""
GPU_LANDING_BYTES = 128 << 20
"""Default of the most bytes of a GPU's landing slot."""


@dataclass(frozen=True, slots=True)
class LandingSizes:
    """Sizes that follow from the settings of receive slots."""

    config: KVTransferConfig
    on_gpu: bool = False

    @property
    def _factor(self) -> int:
        return GPU_FACTOR if self.on_gpu and self.config.kv_slot_bytes is None else 1

    @property
    def per_peer(self) -> int:
        return -(-self.config.kv_slots_per_peer // self._factor)

    def of(self, block_bytes: int, kv_cache: Tensor) -> tuple[int, int]:
        """Return bytes and number of slots, for blocks of ``kv_cache`` (uint8 [blocks,
        block_bytes])."""
        wanted, total = self.config.kv_receive_slots, None
        if kv_cache.is_cuda:
            total = torch.cuda.get_device_properties(kv_cache.device).total_memory
        sizes = slot_sizes(self.config, block_bytes, count=wanted, gpu_bytes=total)
        slot_bytes = sizes.slot_bytes * self._factor
        if self._factor > 1:
            slot_bytes = min(slot_bytes, max(GPU_LANDING_BYTES, slot_bytes_for(0, block_bytes)))
        count = -(-wanted // self._factor)
        return slot_bytes, max(1, min(count, MAX_SLOTS, MAX_RING_BYTES // slot_bytes))
