"""KV memory of a rank, and its two views.

All layers of a block are contiguous: kernels use a layer's strided view, transfers use a block as
one row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from tandem.engine.config.layout import LayerGroup
from tandem.engine.kv_memory import KVCacheAllocator
from tandem.engine.loader.opening import DTYPES
from tandem.protocol.card import KVKind, KVLayout
from tandem.protocol.errors import InvalidParameter


class KVCacheMemory:
    """``num_blocks`` blocks of one layout, each of any group."""

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        num_blocks: int,
        device: torch.device,
        allocate: KVCacheAllocator | None = None,
        *,
        spare: int = 0,
    ) -> None:
        """Allocate flat uint8 memory, by default by the device's allocator.

        ``spare`` blocks follow for kernels only, where the padding of a step is written.
        """
        layout = KVLayout(tuple(each.group for each in groups))
        for group in layout.groups:
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
        views = {layer: view for each in groups for layer, view in self._views(each, every)}
        self.layers: tuple[Tensor, ...] = tuple(views[layer] for layer in sorted(views))
        """Per layer [num_blocks + spare, 2, kv_heads, block_size, head_dim]; of states [num_blocks
        + spare, heads, numbers]."""

    def _views(self, of: LayerGroup, every: int) -> Iterator[tuple[int, Tensor]]:
        group, typed = of.group, self.memory.view(DTYPES[of.group.dtype])
        shape = (every, *group.block_shape)
        dense = torch.empty(group.block_shape, device="meta").stride()
        whole = typed.as_strided(shape, (typed.numel() // max(1, every), *dense))
        for layer, view in zip(of.layers, whole.unbind(1), strict=True):
            yield layer, view[:, 0, :, 0] if group.kind is KVKind.STATE else view


def _plain(size: int, device: torch.device) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device)
