"""Weights as codes of 4 or 8 bits with scales of groups: AWQ, GPTQ and compressed-tensors.

The codes are repacked for the kernels at load, and stay packed. Activations are not rounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.engine.config.quantization import GroupedScheme, Packing
from tandem.engine.delta import Rows
from tandem.engine.loader import OUTPUTS, LinearPart, LoadError, Weights
from tandem.engine.quant.base import (
    ComposedProduct,
    Product,
    SideBySide,
    merged_bias,
)
from tandem.engine.quant.tiled import TiledProduct, takes_tiles
from tandem.kernels.grouped_gemm import GroupedWeight, grouped_linear, grouped_linear_add
from tandem.kernels.grouped_gemm.packing import pack
from tandem.kernels.tiled_gemm import tiled

_AWQ_COLUMNS = (0, 4, 1, 5, 2, 6, 3, 7)
"""Place in AutoAWQ's 32 bits of each of 8 consecutive outputs."""


class GroupedProduct(ComposedProduct):
    """A packed weight."""

    def __init__(self, weight: GroupedWeight, bias: Tensor | None) -> None:
        self.weight, self._bias = weight, bias

    def __call__(self, x: Tensor, rows: Rows | None = None) -> Tensor:
        return grouped_linear(x, self.weight, self._bias)

    def in_float32(self, x: Tensor) -> Tensor:
        return grouped_linear(x, self.weight, self._bias, out_dtype=torch.float32)

    def add_to(self, residual: Tensor, x: Tensor, rows: Rows | None = None) -> Tensor:
        if self._bias is not None:
            return super().add_to(residual, x, rows)
        return grouped_linear_add(x, self.weight, residual)

    def part(self, outputs: slice) -> Product:
        bias = None if self._bias is None else self._bias[outputs]
        return GroupedProduct(self.weight.part(outputs), bias)


class Stored(NamedTuple):
    """One layer's tensors in one form, whatever tool stored them."""

    codes: Tensor
    """uint8 [out, in]."""
    scale: Tensor
    """float32 [groups, out]."""
    zeros: Tensor | None
    """uint8 [groups, out]; None is half of the range."""
    order: Tensor | None
    """int32 [in]: inputs in the order of their groups; None if they are."""


class GroupedMethod:
    """Method of one scheme."""

    name = "grouped"

    def __init__(self, scheme: GroupedScheme) -> None:
        self._scheme = scheme
        self._read = {Packing.AWQ: self._awq, Packing.COMPRESSED: self._compressed}.get(
            scheme.packing, self._gptq
        )

    def load(self, source: Weights, parts: Sequence[LinearPart]) -> Product:
        read = [self._cut(self._sorted(source, each), each) for each in parts]
        if all(_equal(each.order, read[0].order) for each in read):
            return self._merged(read, source.dtype, merged_bias(source, parts))
        return SideBySide(
            [
                self._merged([each], source.dtype, merged_bias(source, [part]))
                for each, part in zip(read, parts, strict=True)
            ]
        )

    @property
    def _half(self) -> int:
        return 1 << (self._scheme.bits - 1)

    def _merged(self, parts: Sequence[Stored], dtype: torch.dtype, bias: Tensor | None) -> Product:
        """Return one product. Scales that ``dtype`` holds exactly are of it, else float32; those of
        tiles are rounded to it."""
        codes, scale = torch.cat([each.codes for each in parts]), _beside(parts)
        zeros = None
        if any(each.zeros is not None for each in parts):
            zeros = torch.cat([self._zeros_of(each) for each in parts], 1)
        kept, order = scale.to(dtype), parts[0].order
        if self._scheme.bits == 4 and takes_tiles(codes, dtype):
            return TiledProduct(tiled(codes, kept, zeros), order, bias)
        weight = GroupedWeight(
            codes if self._scheme.bits == 8 else pack(codes),
            kept if torch.equal(kept.float(), scale) else scale,
            zeros,
            order,
            self._scheme.bits,
        )
        return GroupedProduct(weight, bias)

    def _zeros_of(self, part: Stored) -> Tensor:
        if part.zeros is not None:
            return part.zeros
        return torch.full_like(part.scale, self._half, dtype=torch.uint8)

    def _sorted(self, source: Weights, part: LinearPart) -> Stored:
        """Return the layer's tensors with the inputs of a group next to each other."""
        group = self._group(part)
        if part.shape[1] % group:
            raise LoadError(f"{part.prefix}: {part.shape[1]} inputs are not groups of {group}")
        found = self._read(source, part)
        if found.zeros is not None and bool((found.zeros == self._half).all()):
            found = found._replace(zeros=None)
        if found.order is None:
            return found
        order = _order(found.order, group, part.prefix)
        codes = found.codes if order is None else found.codes.index_select(1, order)
        return found._replace(codes=codes, order=order)

    def _cut(self, found: Stored, part: LinearPart) -> Stored:
        """Return this rank's part. Raises LoadError for a cut inside a group."""
        shard = part.shard
        if shard.count == 1:
            return found
        span = shard.span(part.prefix, part.shape[shard.dim], self._unit(part))
        if shard.dim == OUTPUTS:
            zeros = None if found.zeros is None else found.zeros[:, span]
            return found._replace(codes=found.codes[span], scale=found.scale[:, span], zeros=zeros)
        if found.order is not None:
            raise LoadError(
                f"{part.prefix}: {part.shape[1]} inputs in the order of their groups of "
                f"{self._group(part)} (act-order) cannot be cut into {shard.count} parts"
            )
        codes = found.codes[:, span]
        if self._scheme.group is None:
            return found._replace(codes=codes)
        groups = slice(span.start // self._scheme.group, span.stop // self._scheme.group)
        zeros = None if found.zeros is None else found.zeros[groups]
        return found._replace(codes=codes, scale=found.scale[groups], zeros=zeros)

    def _unit(self, part: LinearPart) -> int:
        return self._scheme.units[part.shard.dim]

    def _group(self, part: LinearPart) -> int:
        return part.shape[1] if self._scheme.group is None else self._scheme.group

    def _awq(self, source: Weights, part: LinearPart) -> Stored:
        (outputs, inner), each = part.shape, 32 // self._scheme.bits
        groups, words = inner // self._group(part), -(-outputs // each)
        places = list(_AWQ_COLUMNS)

        def columns(name: str, rows: int) -> Tensor:
            packed = source.raw(f"{part.prefix}.{name}", torch.int32, (rows, words))
            return self._unpacked(packed).view(rows, words, each)[:, :, places].flatten(1)

        scale = source.get(f"{part.prefix}.scales", (groups, outputs), dtype=torch.float32)
        zeros = columns("qzeros", groups)[:, :outputs]
        return Stored(columns("qweight", inner)[:, :outputs].t(), scale, zeros, None)

    def _gptq(self, source: Weights, part: LinearPart) -> Stored:
        (outputs, inner), each = part.shape, 32 // self._scheme.bits
        prefix, groups = part.prefix, inner // self._group(part)
        _check_bias(source, part)
        packed = source.raw(f"{prefix}.qweight", torch.int32, (-(-inner // each), outputs))
        codes = self._unpacked(packed.t().contiguous())[:, :inner]
        stored = source.raw(f"{prefix}.qzeros", torch.int32, (groups, -(-outputs // each)))
        zeros = self._unpacked(stored)[:, :outputs]
        if self._scheme.packing is Packing.GPTQ:
            zeros = (zeros + 1) & ((1 << self._scheme.bits) - 1)  # 0 was stored as the top code
        scale = source.get(f"{prefix}.scales", (groups, outputs), dtype=torch.float32)
        return Stored(codes, scale, zeros, self._index(source, f"{prefix}.g_idx", inner))

    def _compressed(self, source: Weights, part: LinearPart) -> Stored:
        (outputs, inner), each = part.shape, 32 // self._scheme.bits
        name, groups = f"{part.prefix}.weight", inner // self._group(part)
        packed = source.raw(f"{name}_packed", torch.int32, (outputs, -(-inner // each)))
        codes = self._unpacked(packed)[:, :inner]
        scale = source.get(f"{name}_scale", (outputs, groups), dtype=torch.float32)
        zeros = None
        if not self._scheme.symmetric:
            shape = (-(-outputs // each), groups)
            stored = source.raw(f"{name}_zero_point", torch.int32, shape)
            zeros = self._unpacked(stored.t().contiguous())[:, :outputs]
        if f"{name}_shape" in source:
            _check_shape(source, f"{name}_shape", part.shape)
        index = self._index(source, f"{name}_g_idx", inner)
        return Stored(codes, scale.t().contiguous(), zeros, index)

    def _index(self, source: Weights, name: str, inner: int) -> Tensor | None:
        """Return the group of each input, int32; None if the file has none, or for dummies."""
        if not self._scheme.act_order and name not in source:
            return None
        return None if source.spec(name) is None else source.raw(name, torch.int32, (inner,))

    def _unpacked(self, words: Tensor) -> Tensor:
        """Return codes uint8 [rows, words * 32 / bits] of int32 [rows, words], low bits first."""
        packed = words.contiguous().view(torch.uint8)
        if self._scheme.bits == 8:
            return packed
        return torch.stack((packed & 15, packed >> 4), 2).flatten(1)


def _beside(parts: Sequence[Stored]) -> Tensor:
    return torch.cat([each.scale for each in parts], 1)


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


def _order(index: Tensor, group: int, prefix: str) -> Tensor | None:
    """Return the inputs by their groups, int32; None if they are in this order."""
    wanted = torch.arange(len(index), dtype=index.dtype, device=index.device) // group
    if torch.equal(index, wanted):
        return None
    order = index.argsort(stable=True)
    if not torch.equal(index[order], wanted):
        raise LoadError(f"{prefix}: a group has other than {group} inputs in its g_idx")
    return order.int()


def _check_bias(source: Weights, part: LinearPart) -> None:
    """Raise LoadError for a bias of a layer without one, unless it is zero: AutoGPTQ stores
    zeros."""
    name = f"{part.prefix}.bias"
    if part.bias or name not in source or source.spec(name) is None:
        return
    if bool(source.get(name, (part.shape[0],)).any()):
        raise LoadError(f"{name} is not zero, and the layer has no bias in config.json")


def _check_shape(source: Weights, name: str, shape: tuple[int, int]) -> None:
    stated = source.raw(name, torch.int64, (2,))
    if source.spec(name) is not None and tuple(stated.tolist()) != shape:
        raise LoadError(f"{name} is {stated.tolist()}; the model needs {list(shape)}")
