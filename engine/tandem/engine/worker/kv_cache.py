"""KV memory of a rank, and its two views.

All layers of a block are contiguous: kernels use a layer's strided view, transfers use a block as
one row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from tandem.engine.config.kv_scales import KVScales, rows_of
from tandem.engine.config.layout import LayerGroup
from tandem.engine.kv_memory import KVCacheAllocator
from tandem.engine.loader.opening import DTYPES
from tandem.engine.ranks import ALONE, Ranks
from tandem.protocol.card import FP8_CODES, KVKind, KVLayout, Shard
from tandem.protocol.errors import InvalidParameter

_DTYPES = {**DTYPES, FP8_CODES: torch.float8_e4m3fn}
LEAST_CAPABILITY = (8, 9)
"""Compute capability from which kernels read codes."""


def check_device(groups: Sequence[LayerGroup], device: torch.device) -> None:
    """Raise InvalidParameter if the device cannot hold KV of these types."""
    if device.type != "cuda" or all(each.group.dtype != FP8_CODES for each in groups):
        return
    found = torch.cuda.get_device_capability(device)
    if found < LEAST_CAPABILITY:
        have, least = (".".join(map(str, each)) for each in (found, LEAST_CAPABILITY))
        allowed = f"auto: fp8 requires compute capability {least}, and the GPU has {have}"
        raise InvalidParameter("kv_cache_dtype", "fp8", allowed)


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
        scales: KVScales | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        """Allocate flat uint8 memory, by default by the device's allocator.

        ``spare`` blocks follow for kernels only, where the padding of a step is written. ``scales``
        are those of all heads, of which ``ranks`` has a part.
        """
        layout = KVLayout(tuple(each.group for each in groups))
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
        """Per layer [num_blocks + spare, 2, kv_heads, block_size, head_dim]; of latents [num_blocks
        + spare, block_size, numbers]; of states [num_blocks + spare, heads, numbers]."""

        self.scales: dict[int, Tensor] = {
            layer: self._scales(each, layer, scales or {}, ranks).to(device)
            for each in groups
            if each.group.dtype == FP8_CODES
            for layer in each.layers
        }
        """Per layer with pages of codes, float32 [2, kv_heads]: the factors of K and of V."""

    def _scales(self, of: LayerGroup, layer: int, scales: KVScales, ranks: Ranks) -> Tensor:
        heads = Shard(ranks.rank, ranks.size).heads(of.group.num_kv_heads * ranks.size)
        return torch.tensor(rows_of(scales, [layer], heads), dtype=torch.float32)

    def _views(self, of: LayerGroup, every: int) -> Iterator[tuple[int, Tensor]]:
        group, typed = of.group, self.memory.view(_DTYPES[of.group.dtype])
        shape = (every, *group.block_shape)
        dense = torch.empty(group.block_shape, device="meta").stride()
        whole = typed.as_strided(shape, (typed.numel() // max(1, every), *dense))
        for layer, view in zip(of.layers, whole.unbind(1), strict=True):
            if group.kind is KVKind.STATE:
                view = view[:, 0, :, 0]
            yield layer, view[:, 0, 0] if group.kind is KVKind.LATENT else view


def _plain(size: int, device: torch.device) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device)
