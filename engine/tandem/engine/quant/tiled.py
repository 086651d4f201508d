"""Weights as codes of 4 bits in tiles for Hopper's matrix units."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.engine.delta import Rows
from tandem.engine.quant.base import ComposedProduct, Product
from tandem.kernels.launch import generation
from tandem.kernels.tiled_gemm import (
    BLOCK,
    TILE,
    TiledWeight,
    tiled_linear,
    tiled_linear_add,
)

_HOPPER = 9


def takes_tiles(codes: Tensor, dtype: torch.dtype) -> bool:
    """Return whether tiles are multiplied here: on Hopper, codes [out, in] of whole tiles and
    activations of 16 bits."""
    whole = codes.shape[0] % TILE == 0 and codes.shape[1] % BLOCK == 0
    return whole and dtype is not torch.float32 and generation(codes.device) == _HOPPER


class TiledProduct(ComposedProduct):
    """Tiles, and the order of their inputs: int32 [in], None for that of x."""

    def __init__(self, weight: TiledWeight, order: Tensor | None, bias: Tensor | None) -> None:
        self.weight, self._order, self._bias = weight, order, bias

    def __call__(self, x: Tensor, rows: Rows | None = None) -> Tensor:
        return tiled_linear(self._ordered(x), self.weight, self._bias)

    def in_float32(self, x: Tensor) -> Tensor:
        return tiled_linear(self._ordered(x), self.weight, self._bias, out_dtype=torch.float32)

    def add_to(self, residual: Tensor, x: Tensor, rows: Rows | None = None) -> Tensor:
        if self._bias is not None:
            return super().add_to(residual, x, rows)
        return tiled_linear_add(self._ordered(x), self.weight, residual)

    def part(self, outputs: slice) -> Product | None:
        """Return the product of some outputs; None if they are cut inside tiles."""
        first, end, _ = outputs.indices(self.weight.outputs)
        if first % TILE or end % TILE:
            return None
        bias = None if self._bias is None else self._bias[first:end]
        return TiledProduct(self.weight.part(first // TILE, end // TILE), self._order, bias)

    def _ordered(self, x: Tensor) -> Tensor:
        return x if self._order is None else x.index_select(1, self._order)
