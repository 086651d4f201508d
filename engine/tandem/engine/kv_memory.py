"""What the ranks' KV memory is, for plan, run and executors alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tandem.protocol.layout import KVLayout

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the ranks can hold, known after the weights are loaded."""

    num_blocks: int
    layout: KVLayout
    num_cpu_blocks: int = 0
    """Blocks in host memory behind them, where blocks are offloaded."""
    device_name: str = ""
    """As the driver names the rank's device; empty for a CPU."""


@dataclass(frozen=True, slots=True)
class KVRegion:
    """One rank's KV memory, as this process reaches it."""

    rank: int
    blocks: Tensor
    """uint8 [num_blocks, block_bytes], dense, on the rank's device."""


SlabAllocator = Callable[[int], Any]
"""Bytes to a writable flat uint8 tensor of that many bytes; owns the memory. Injected by roles
that register the slab with a transport; the engine alone uses ``torch.empty``."""
