"""Memory of offloaded blocks at a rank: its size, and its choice by the settings."""

from __future__ import annotations

import logging
from collections.abc import Set as AbstractSet
from typing import Protocol

from torch import Tensor

from tandem.engine.config import EngineConfig
from tandem.engine.step import BlockTransfers, TransferReport
from tandem.engine.worker.device_events import WAIT_SECONDS, DeviceEvent
from tandem.engine.worker.offload import GIB, HostBlocks, available
from tandem.protocol.card import KVLayout
from tandem.protocol.errors import InvalidParameter

logger = logging.getLogger(__name__)


class BlockMedium(Protocol):
    """Offloaded blocks, for the thread of the steps."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def is_storing(self) -> bool:
        """Return whether a step that writes blocks may have to wait."""
        ...

    def begin(self, transfers: BlockTransfers, written: AbstractSet[int]) -> DeviceEvent | None:
        """Queue a step's transfers before the step, which writes the blocks ``written``. Return the
        event after all stores so far, or None if that is before the step."""
        ...

    def report(self, *, wait: bool, seconds: float = WAIT_SECONDS) -> TransferReport | None:
        """Return loads ended since the last call; ``wait`` for all. Raises TimeoutError."""
        ...

    def close(self) -> int:
        """Free the memory after the copies in progress; return its bytes."""
        ...


def open_medium(config: EngineConfig, kv_cache: Tensor, num_blocks: int) -> BlockMedium:
    """Return the medium of ``num_blocks`` blocks; ``kv_cache`` is [device blocks, block_bytes]
    uint8. Raises TandemError."""
    return HostBlocks(kv_cache, num_blocks)


def num_cpu_blocks(config: EngineConfig, layout: KVLayout, *, promised: int = 0) -> int:
    """Return the blocks of host memory for offloaded KV; 0 without offloading.
    ``promised``: bytes of a CPU's KV cache, whose pages are not used yet.

    Raises InvalidParameter if not one block fits, or memory is too small.
    """
    size = config.cache.kv_offloading_size
    if size is None:
        return 0
    asked, there = int(size * GIB), available()
    if asked < layout.block_bytes:
        allowed = f"at least one block of {layout.block_bytes / GIB:.3g} GiB"
        raise InvalidParameter("kv_offloading_size", size, allowed)
    left = max(there.nbytes - promised, 0)
    if asked > left:
        allowed = f"at most {left / GIB:.1f} GiB, the memory that {there.of} has left"
        if promised:
            allowed += f" next to {promised / GIB:.1f} GiB of blocks"
        raise InvalidParameter("kv_offloading_size", size, allowed)
    count = asked // layout.block_bytes
    logger.info("offloaded KV: %d blocks in host memory, %.2f GiB", count, asked / GIB)
    return count
