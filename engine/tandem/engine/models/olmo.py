"""OLMo 2 and 3: norms after attention and MLP only, and over all heads of q and of k."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from tandem.engine.config import ModelFacts
from tandem.engine.layers.linear import Linear
from tandem.engine.loader import OUTPUTS, Weights
from tandem.engine.models.base import StepContext
from tandem.engine.models.decoder import Decoder
from tandem.engine.models.gemma import SandwichLayer
from tandem.engine.models.separate import SeparateAttention, SeparateBuilder, Unnormed
from tandem.engine.ranks import Ranks
from tandem.kernels.norm import rms_norm


class WideNorm:
    """RMSNorm over the outputs of all ranks, of which each has a part."""

    def __init__(self, weight: Tensor, eps: float, ranks: Ranks) -> None:
        """``weight`` is [outputs of this rank]."""
        self._weight = weight
        self._eps = eps
        self._ranks = ranks

    def __call__(self, x: Tensor) -> Tensor:
        """Return the normed x [tokens, outputs of this rank]."""
        if self._ranks.size == 1:
            return rms_norm(x, self._weight, self._eps)
        wide = x.float()
        squares = self._ranks.sum(wide.square().mean(1, keepdim=True)) / self._ranks.size
        return wide.mul_((squares + self._eps).rsqrt_()).mul_(self._weight.float()).to(x.dtype)


@dataclass(frozen=True, slots=True)
class OlmoAttention(SeparateAttention):
    """Attention with norms of q and k over all heads."""

    q_norm: WideNorm
    k_norm: WideNorm

    def _write(self, projected: Tensor, step: StepContext) -> Tensor:
        keys = step.kv[self.index].shape[2] * self.head_dim
        width = projected.shape[1]
        q, k, v = projected.tensor_split((width - 2 * keys, width - keys), 1)
        normed = torch.cat((self.q_norm(q), self.k_norm(k), v), 1)
        return SeparateAttention._write(self, normed, step)


@dataclass(frozen=True, slots=True)
class OlmoBuilder(SeparateBuilder):
    """Builder of one model."""

    def layer(self, index: int) -> SandwichLayer:
        prefix, hidden = f"{self.prefix}layers.{index}", self.facts.hidden_size
        unnormed = Unnormed(self.weights.dtype)
        return SandwichLayer(
            input_norm=unnormed,
            attention=self.attention(index, f"{prefix}.self_attn"),
            attention_norm=self.norm(f"{prefix}.post_attention_layernorm", hidden),
            mlp_input_norm=unnormed,
            mlp=self.mlp(f"{prefix}.mlp"),
            mlp_norm=self.norm(f"{prefix}.post_feedforward_layernorm", hidden),
        )

    def attention_by(self, qkv: Linear, index: int, prefix: str) -> OlmoAttention:
        """Return the attention; its ``qkv`` is computed as a whole, for the norms."""
        plain = SeparateBuilder.attention_by(self, qkv, index, prefix)
        own: dict[str, Any] = {each.name: getattr(plain, each.name) for each in fields(plain)}
        q, k = (
            self.wide_norm(f"{prefix}.{name}_norm.weight", count * self.facts.head_dim)
            for name, count in (("q", self.facts.num_heads), ("k", self.facts.num_kv_heads))
        )
        return OlmoAttention(**{**own, "parts": None, "q_norm": q, "k_norm": k})

    def wide_norm(self, name: str, width: int) -> WideNorm:
        weight = self.weights.get(name, (width,), self.weights.shard(OUTPUTS)).clone()
        return WideNorm(weight, self.facts.rms_norm_eps, self.weights.ranks)


def load(facts: ModelFacts, weights: Weights) -> Decoder:
    """Load the model with its weights. Raises a LoadError."""
    return OlmoBuilder.of(facts, weights).build()
