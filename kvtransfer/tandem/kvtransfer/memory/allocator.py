"""Allocators of the KV cache's memory, for transports that require a special kind."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from tandem.kvtransfer.config import KVTransferConfig
from tandem.memory.shared import shared_tensor


def kv_cache_allocator(
    config: KVTransferConfig, *, on_gpu: bool = False
) -> Callable[[int], Tensor] | None:
    """Return a function from bytes to flat uint8 memory that ``kv_connector`` can share; None for
    the engine's own, as for a GPU."""
    near = config.kv_connector == "auto" and config.kv_node_folder is not None
    return (
        shared_tensor
        if not on_gpu and (near or config.kv_connector in ("shm", "shm_agent"))
        else None
    )
