"""Scales of whole outputs or of a tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.engine.config.quantization import Granularity
from tandem.engine.loader import OUTPUTS, WHOLE, LinearPart, Weights

_NAMES = ("weight_scale", "weight_scale_inv")
"""Ends of names by compressed-tensors and vLLM, and by transformers."""


def output_scale(source: Weights, part: LinearPart, granularity: Granularity) -> Tensor:
    """Return float32 [outputs of this rank]: one number for each, or that of the tensor."""
    names = [f"{part.prefix}.{each}" for each in _NAMES]
    name = next((each for each in names if each in source), names[0])
    outputs = part.shard.part_of(part.prefix, part.shape)[0]
    if granularity is Granularity.TENSOR:
        shape = _shape_of(source, name, (1,), ())
        return source.get(name, shape, dtype=torch.float32).reshape(1).repeat(outputs)
    shape = _shape_of(source, name, (part.shape[0], 1), (part.shape[0],))
    shard = part.shard if part.shard.dim == OUTPUTS else WHOLE
    return source.get(name, shape, shard, dtype=torch.float32).flatten().clone()


def scalar(source: Weights, name: str) -> Tensor:
    """Return the float32 number of a tensor with one, as a tensor without dimensions."""
    return source.get(name, _shape_of(source, name, (1,), ()), dtype=torch.float32).reshape(())


def _shape_of(
    source: Weights, name: str, usual: tuple[int, ...], other: tuple[int, ...]
) -> tuple[int, ...]:
    """Return the shape that the tensor must have: ``other`` if it has it, else ``usual``."""
    spec = source.spec(name)
    return other if spec is not None and spec.shape == other else usual
