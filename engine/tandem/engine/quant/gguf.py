"""Weights in the blocks of a GGUF file. A CPU multiplies them as they are; for a GPU they are
decoded at load."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tandem.engine.config.quantization import GgufScheme
from tandem.engine.loader import LinearPart, Shard, Weights
from tandem.engine.quant.base import PlainMethod, Product, merged_bias
from tandem.engine.quant.blocks import Backends, BlockProduct
from tandem.kernels.packed_gemm import FORMS, Packed
from tandem.kernels.packed_gemm.reference import STRIP, decoded


class GgufMethod:
    """Method of blocks of one kind under the name of the plain weight."""

    name = "gguf"

    def __init__(self, scheme: GgufScheme, plain: PlainMethod) -> None:
        self._kind = scheme.kind
        self._plain = plain
        self._backends = Backends()

    def load(self, source: Weights, parts: Sequence[LinearPart]) -> Product:
        names = [f"{each.prefix}.weight" for each in parts]
        if source.spec(names[0]) is None:  # dummies have no blocks
            return self._plain.load(source, parts)
        found = [
            read_blocks(source, name, each.shape, each.shard, self._kind)
            for name, each in zip(names, parts, strict=True)
        ]
        bias = merged_bias(source, parts)
        if source.device.type == "cpu":
            return BlockProduct(found, bias, self._backends)
        return self._plain.hold(dense_of(found, source.dtype), bias)


def read_blocks(
    source: Weights, name: str, shape: tuple[int, int], shard: Shard, kind: str
) -> Packed:
    """Return a rank's part of a weight of ``shape``. Raises a LoadError, also for inputs that are
    cut within a block."""
    values, size = FORMS[kind]
    if shard.dim:
        shard.span(name, shape[1], values)
    codes = source.raw(name, torch.uint8, (shape[0], shape[1] // values * size), shard)
    return Packed(codes, kind)


def dense_of(parts: Sequence[Packed], dtype: torch.dtype) -> Tensor:
    """Return the weights of all parts, decoded on their device a strip at a time."""
    outputs = sum(len(each.blocks) for each in parts)
    out = torch.empty(outputs, parts[0].inputs, dtype=dtype, device=parts[0].blocks.device)
    at = 0
    for part in parts:
        for codes in part.blocks.split(STRIP):  # type: ignore[no-untyped-call]
            out[at : at + len(codes)] = decoded(codes, part.kind)
            at += len(codes)
    return out
