"""KV memory of a rank, and its two views.

All layers of a block are contiguous: kernels use a layer's strided view, transfers use a block as
one row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.engine.kv_memory import KVCacheAllocator
from tandem.engine.loader.opening import DTYPES
from tandem.protocol.card import KVLayout
from tandem.protocol.errors import InvalidParameter


class KVCacheMemory:
    """``num_blocks`` blocks of one layout."""

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        device: torch.device,
        allocate: KVCacheAllocator | None = None,
        *,
        spare: int = 0,
    ) -> None:
        """Allocate flat uint8 memory, by default by the device's allocator.

        ``spare`` blocks follow for kernels only, where the padding of a step is written.
        """
        (group,) = layout.groups
        if group.dtype not in DTYPES:
            raise InvalidParameter("kv_cache_dtype", group.dtype, f"one of {', '.join(DTYPES)}")
        every = num_blocks + spare
        size = every * layout.block_bytes
        memory = _plain(size, device) if allocate is None or not size else allocate(size)
        assert memory.dtype == torch.uint8, f"the KV cache's allocator gave {memory.dtype}"
        assert memory.numel() >= size, (
            f"the KV cache's allocator gave {memory.numel()} of {size} bytes"
        )
        self.memory: Tensor = memory.view(-1)[:size]
        self.blocks: Tensor = self.memory.view(every, layout.block_bytes)[:num_blocks]
        """[num_blocks, block_bytes] uint8."""
        whole = self.memory.view(DTYPES[group.dtype]).view(every, *group.block_shape)
        self.layers: tuple[Tensor, ...] = tuple(whole.unbind(1))
        """Per layer [num_blocks + spare, 2, kv_heads, block_size, head_dim]."""


def _plain(size: int, device: torch.device) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device)
