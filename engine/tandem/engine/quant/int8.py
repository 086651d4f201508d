"""Weights in int8 with a scale per output; activations are rounded to int8 by row."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tandem.engine.config.quantization import Int8Scheme
from tandem.engine.delta import Rows
from tandem.engine.loader import LinearPart, Weights
from tandem.engine.quant.base import ComposedProduct, Product, merged_bias
from tandem.engine.quant.scales import output_scale
from tandem.kernels.int8_gemm import int8_linear


class Int8Product(ComposedProduct):
    """Weight int8 [out, in] with its scales [out]."""

    def __init__(self, weight: Tensor, scale: Tensor, bias: Tensor | None) -> None:
        self.weight, self.scale, self._bias = weight, scale, bias

    def __call__(self, x: Tensor, rows: Rows | None = None) -> Tensor:
        return int8_linear(x, self.weight, self.scale, self._bias)

    def in_float32(self, x: Tensor) -> Tensor:
        return int8_linear(x, self.weight, self.scale, self._bias, out_dtype=torch.float32)

    def part(self, outputs: slice) -> Product:
        bias = None if self._bias is None else self._bias[outputs]
        return Int8Product(self.weight[outputs], self.scale[outputs], bias)


class Int8Method:
    """Method of int8 weights and their scales. If ranks cut the inputs, each rounds its part of a
    row by its own largest number."""

    name = "int8"

    def __init__(self, scheme: Int8Scheme) -> None:
        self._scheme = scheme

    def load(self, source: Weights, parts: Sequence[LinearPart]) -> Product:
        weights = [
            source.raw(f"{each.prefix}.weight", torch.int8, each.shape, each.shard).contiguous()
            for each in parts
        ]
        scales = [output_scale(source, each, self._scheme.granularity) for each in parts]
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        return Int8Product(weight, torch.cat(scales), merged_bias(source, parts))
