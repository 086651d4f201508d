"""How many landing slots a consumer has, and how large they are."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.kvtransfer.config import KVTransferConfig
from tandem.kvtransfer.memory.sizes import slot_sizes
from tandem.kvtransfer.transports.agent.wire import MAX_RING_BYTES, MAX_SLOTS


@dataclass(frozen=True, slots=True)
class LandingSizes:
    """As the settings of receive slots say."""

    config: KVTransferConfig

    @property
    def per_peer(self) -> int:
        """Slots that one producer's blocks may take."""
        return self.config.kv_slots_per_peer

    def of(self, block_bytes: int, slab: Tensor) -> tuple[int, int]:
        """Bytes of a slot, and slots; for blocks of ``slab`` (uint8 [blocks, block_bytes])."""
        wanted = self.config.kv_receive_slots
        total = None
        if slab.is_cuda:
            total = torch.cuda.get_device_properties(slab.device).total_memory
        slot_bytes = slot_sizes(self.config, block_bytes, count=wanted, gpu_bytes=total).slot_bytes
        return slot_bytes, max(1, min(wanted, MAX_SLOTS, MAX_RING_BYTES // slot_bytes))
