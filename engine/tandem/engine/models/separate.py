"""Attention and MLP after a norm that products do not fold in: LayerNorm, or none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from tandem.engine.layers.linear import RMSNorm
from tandem.engine.models.base import StepContext
from tandem.engine.models.decoder import MLP, Attention
from tandem.engine.models.projections import ProjectionBuilder
from tandem.engine.quant import Rows
from tandem.kernels.activation import gated


class Unnormed(RMSNorm):
    """The stream itself, in the type of the weights."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(torch.empty(0, dtype=dtype), 0.0)

    def __call__(self, x: Tensor) -> Tensor:
        return x.to(self.weight.dtype)


class CenteredNorm(RMSNorm):
    """LayerNorm of a stream that may be wider than the weights."""

    def __init__(self, weight: Tensor, shift: Tensor | None, eps: float) -> None:
        """``weight`` and ``shift`` are [hidden]."""
        super().__init__(weight, eps)
        self._gain = weight.float()
        self._shift = None if shift is None else shift.float()

    def __call__(self, x: Tensor) -> Tensor:
        found = layer_norm(x.float(), self._gain.shape, self._gain, self._shift, self.eps)
        return found.to(self.weight.dtype)


@dataclass(frozen=True, slots=True)
class SeparateAttention(Attention):
    """Attention that computes its norm on its own."""

    def __call__(self, stream: Tensor, norm: RMSNorm, step: StepContext) -> Tensor:
        q = self._write(self.qkv(norm(stream), step.rows), step)
        return self._attend(q, step.metadata(self.group), step)


@dataclass(frozen=True, slots=True)
class SeparateMLP(MLP):
    """MLP that computes its norm on its own."""

    def __call__(self, stream: Tensor, norm: RMSNorm, rows: Rows) -> Tensor:
        return self.down.add_to(stream, self.inner(stream, norm, rows), rows)

    def inner(self, stream: Tensor, norm: RMSNorm, rows: Rows) -> Tensor:
        return gated(self.gate_up(norm(stream), rows), self.gate)


@dataclass(frozen=True, slots=True)
class SeparateBuilder(ProjectionBuilder):
    """Builder of a decoder whose attention and MLP compute their norms."""

    attention_type: ClassVar[type[Attention]] = SeparateAttention
    mlp_type: ClassVar[type[MLP]] = SeparateMLP


@dataclass(frozen=True, slots=True)
class CenteredBuilder(SeparateBuilder):
    """Builder of a decoder with LayerNorm."""

    norm_bias: ClassVar[bool] = False

    def norm(self, prefix: str, width: int) -> CenteredNorm:
        shift = self.vector(f"{prefix}.bias", width) if self.norm_bias else None
        weight = self.vector(f"{prefix}.weight", width)
        return CenteredNorm(weight, shift, self.facts.rms_norm_eps)
