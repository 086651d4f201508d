"""Choice of the blocks of an offload tier by the settings."""

from __future__ import annotations

from tandem.engine.config import EngineConfig
from tandem.engine.kv_memory import Capacity
from tandem.engine.offload.lru import LRUBlocks


def blocks_of(config: EngineConfig, capacity: Capacity) -> LRUBlocks:
    """Return the blocks of the ranks' medium, with those that it holds from earlier on."""
    return LRUBlocks(capacity.num_cpu_blocks)
