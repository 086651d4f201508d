"""Weights in fp8 (e4m3) with a scale for each block, output or tensor, held and read in 8 bits.

On Hopper activations of 16 bits are rounded to fp8, too; sums are float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from tandem.engine.config.quantization import FP8_BLOCK, Fp8Scheme, Granularity
from tandem.engine.delta import Rows
from tandem.engine.loader import LinearPart, Weights
from tandem.engine.quant.base import (
    ComposedProduct,
    Product,
    SideBySide,
    merged_bias,
)
from tandem.engine.quant.scales import output_scale
from tandem.kernels.activation import Gate
from tandem.kernels.fp8_gemm import (
    BLOCK,
    FP8Weight,
    fp8_feed_forward,
    fp8_linear,
    fp8_linear_add,
    fp8_norm_linear,
)

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
    """Weight [out, in] of e4m3 with its scales: [blocks of out, blocks of in], or [out]."""

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

    def of_norm(self, x: Tensor, gain: Tensor, eps: float, rows: Rows | None = None) -> Tensor:
        return fp8_norm_linear(x, gain, eps, self.weight, self.scale, self._bias)

    def feed_forward(
        self,
        down: Product,
        residual: Tensor,
        x: Tensor,
        gain: Tensor,
        eps: float,
        rows: Rows | None = None,
        gate: Gate = Gate.SILU,
    ) -> Tensor:
        if isinstance(down, FP8Product) and gate is Gate.SILU:
            plain = self._bias is None and down._bias is None
            if plain:
                weights = FP8Weight(self.weight, self.scale), FP8Weight(down.weight, down.scale)
                return fp8_feed_forward(x, gain, eps, *weights, residual)
        return super().feed_forward(down, residual, x, gain, eps, rows, gate)

    def part(self, outputs: slice) -> Product | None:
        """Return the product of some outputs; None if they are cut inside blocks."""
        first, end, _ = outputs.indices(len(self.weight))
        bias = None if self._bias is None else self._bias[first:end]
        if self.scale.dim() == 1:
            return FP8Product(self.weight[first:end], self.scale[first:end], bias)
        if first % BLOCK or (end % BLOCK and end < len(self.weight)):
            return None
        blocks = slice(first // BLOCK, -(-end // BLOCK))
        return FP8Product(self.weight[first:end], self.scale[blocks], bias)


def in_blocks(
    source: Weights,
    parts: Sequence[LinearPart],
    read: Callable[[Weights, LinearPart], tuple[Tensor, Tensor]],
) -> Product:
    """Return the product of parts whose codes and scales of blocks ``read`` returns: one, unless
    parts share blocks. Raises LoadError for a rank's part that is not of whole blocks."""
    for part in parts:
        extent = part.shape[part.shard.dim]
        part.shard.span(f"{part.prefix}.weight", extent, BLOCK)
    outputs = [each.shard.part_of(each.prefix, each.shape)[0] for each in parts]
    if any(each % BLOCK for each in outputs[:-1]):
        return SideBySide([in_blocks(source, [each], read) for each in parts])
    weights, scales = zip(*(read(source, each) for each in parts), strict=True)
    return FP8Product(_joined(weights), torch.cat(scales), merged_bias(source, parts))


def _joined(weights: Sequence[Tensor]) -> Tensor:
    if len(weights) == 1:
        return weights[0]
    return torch.cat([each.view(torch.uint8) for each in weights]).view(CODES)


class FP8Method:
    """Method of e4m3 weights with scales, or of plain weights that are rounded at load."""

    name = "fp8"

    def __init__(self, scheme: Fp8Scheme) -> None:
        self._scheme = scheme

    def load(self, source: Weights, parts: Sequence[LinearPart]) -> Product:
        if self._scheme.granularity is Granularity.BLOCK:
            return in_blocks(source, parts, self._block)
        weights = [
            source.raw(f"{each.prefix}.weight", CODES, each.shape, each.shard).contiguous()
            for each in parts
        ]
        scales = [output_scale(source, each, self._scheme.granularity) for each in parts]
        return FP8Product(_joined(weights), torch.cat(scales), merged_bias(source, parts))

    def _block(self, source: Weights, part: LinearPart) -> tuple[Tensor, Tensor]:
        """Return codes and scales of one part; compressed-tensors has its own name of scales."""
        name, shard = f"{part.prefix}.weight", part.shard
        if self._scheme.at_load:
            return rounded(source.get(name, part.shape, shard))
        shape = tuple(-(-extent // BLOCK) for extent in part.shape)
        weight = source.raw(name, CODES, part.shape, shard).contiguous()
        there = f"{name}_scale_inv" in source or f"{name}_scale" not in source
        scales = f"{name}_scale_inv" if there else f"{name}_scale"
        return weight, source.get(scales, shape, shard, dtype=torch.float32)
