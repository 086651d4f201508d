"""Weights in fp8 (e4m3) with a scale for each block, held and read in 8 bits.

On Hopper activations of 16 bits are rounded to fp8, too; sums are float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from tandem.engine.config.facts import FP8_BLOCK, QuantFacts
from tandem.engine.delta import Rows
from tandem.engine.loader import LinearPart, LoadError, Weights
from tandem.engine.quant.base import (
    ComposedProduct,
    LinearMethod,
    Product,
    merged_bias,
)
from tandem.kernels.fp8_gemm import BLOCK, fp8_linear, fp8_linear_add

assert FP8_BLOCK == (BLOCK, BLOCK)
CODES = torch.float8_e4m3fn
_LARGEST = 448.0


def rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the e4m3 codes of weight [out, in], and the scale of each block: the largest number of
    a block has the largest code."""
    outputs, inner = weight.shape
    blocks = pad(weight.float(), (0, -inner % BLOCK, 0, -outputs % BLOCK))
    blocks = blocks.view(-(-outputs // BLOCK), BLOCK, -(-inner // BLOCK), BLOCK)
    scale = (blocks.abs().amax((1, 3)) / _LARGEST).clamp_(min=torch.finfo(torch.float32).tiny)
    codes = (blocks / scale[:, None, :, None]).flatten(2).flatten(0, 1)[:outputs, :inner]
    return codes.contiguous().to(CODES), scale


class FP8Product(ComposedProduct):
    """Weight [out, in] of e4m3 with its scales [blocks of out, blocks of in]."""

    def __init__(self, weight: Tensor, scale: Tensor, bias: Tensor | None) -> None:
        self.weight, self.scale, self._bias = weight, scale, bias

    def __call__(self, x: Tensor, rows: Rows | None = None) -> Tensor:
        return fp8_linear(x, self.weight, self.scale, self._bias)

    def in_float32(self, x: Tensor) -> Tensor:
        return fp8_linear(x, self.weight, self.scale, self._bias, out_dtype=torch.float32)

    def add_to(self, residual: Tensor, x: Tensor, rows: Rows | None = None) -> Tensor:
        if self._bias is not None:
            return super().add_to(residual, x, rows)
        return fp8_linear_add(x, self.weight, self.scale, residual)

    def part(self, outputs: slice) -> Product | None:
        """Return outputs cut between blocks, or None."""
        first, end, _ = outputs.indices(len(self.weight))
        if first % BLOCK or (end % BLOCK and end < len(self.weight)):
            return None
        blocks = slice(first // BLOCK, -(-end // BLOCK))
        bias = None if self._bias is None else self._bias[first:end]
        return FP8Product(self.weight[first:end], self.scale[blocks], bias)


class SideBySide(ComposedProduct):
    """Products of the same x, their outputs in order, for parts that share blocks."""

    def __init__(self, products: Sequence[Product]) -> None:
        self._products = products

    def __call__(self, x: Tensor, rows: Rows | None = None) -> Tensor:
        return torch.cat([each(x, rows) for each in self._products], 1)


class FP8Method:
    """Method of weight and weight_scale_inv, or of plain weights that are rounded at load; plain
    layers of an fp8 checkpoint have the plain method."""

    name = "fp8"

    def __init__(self, facts: QuantFacts, plain: LinearMethod) -> None:
        self._facts = facts
        self._plain = plain

    def load(self, source: Weights, parts: Sequence[LinearPart]) -> Product:
        kept = [self._facts.keeps(each.prefix) for each in parts]
        if all(kept):
            return self._plain.load(source, parts)
        if any(kept):
            names = ", ".join(each.prefix for each in parts)
            raise LoadError(f"{names}: all or none of them in modules_to_not_convert")
        aligned = [self._outputs(each) % BLOCK == 0 for each in parts[:-1]]
        if all(aligned):
            return self._merged(source, parts)
        return SideBySide([self._merged(source, [each]) for each in parts])

    def _merged(self, source: Weights, parts: Sequence[LinearPart]) -> Product:
        weights, scales = zip(*(self._read(source, each) for each in parts), strict=True)
        weight = weights[0]
        if len(weights) > 1:
            weight = torch.cat([each.view(torch.uint8) for each in weights]).view(CODES)
        return FP8Product(weight, torch.cat(scales), merged_bias(source, parts))

    def _read(self, source: Weights, part: LinearPart) -> tuple[Tensor, Tensor]:
        shard, name = part.shard, f"{part.prefix}.weight"
        for dim, extent in enumerate(part.shape):
            if dim == shard.dim:
                shard.span(name, extent, BLOCK)
        if self._facts.at_load:
            return rounded(source.get(name, part.shape, shard))
        scales = tuple(-(-extent // BLOCK) for extent in part.shape)
        weight = source.raw(name, CODES, part.shape, shard)
        scale = source.get(f"{name}_scale_inv", scales, shard, dtype=torch.float32)
        return weight.contiguous(), scale

    @staticmethod
    def _outputs(part: LinearPart) -> int:
        return part.shard.part_of(part.prefix, part.shape)[0]
