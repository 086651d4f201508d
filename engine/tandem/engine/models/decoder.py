"""The decoder that the served families share: pre-norm, RoPE, grouped queries, gated MLP.

Families differ in a few facts (biases, norms of q and k) and are small files beside this one. The
residual stream is one tensor that the fused norms add to; no layer makes a copy of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tandem.engine.config import ModelFacts
from tandem.engine.layers.embedding import Embedding
from tandem.engine.layers.linear import Linear
from tandem.engine.layers.logits import Logits
from tandem.engine.layers.norm import RMSNorm
from tandem.engine.layers.rotary import Rotary
from tandem.engine.models.base import StepContext
from tandem.kernels.activation import silu_and_mul
from tandem.kernels.rotary_kv import QKNorm, rotary_kv


@dataclass(frozen=True, slots=True)
class Attention:
    """Projection, rotation and KV write, attention, projection back."""

    index: int
    qkv: Linear
    out: Linear
    head_dim: int
    qk_norm: QKNorm | None

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        """[tokens, hidden] to [tokens, heads * head_dim], before ``out``."""
        kv = step.kv[self.index]
        qkv = self.qkv(x).view(x.shape[0], -1, self.head_dim)
        q = rotary_kv(qkv, kv, step.rotation, step.slots, self.qk_norm)
        return step.attention.forward(q, kv, step.metadata).flatten(1)


@dataclass(frozen=True, slots=True)
class MLP:
    """down(silu(gate(x)) * up(x))."""

    gate_up: Linear
    down: Linear

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, hidden] to the same."""
        return self.down(silu_and_mul(self.gate_up(x)))


@dataclass(frozen=True, slots=True)
class Layer:
    """One block of the decoder."""

    input_norm: RMSNorm
    attention: Attention
    post_norm: RMSNorm
    mlp: MLP


@dataclass(frozen=True, slots=True)
class Decoder:
    """A whole model of one rank. Implements CausalModel."""

    facts: ModelFacts
    embedding: Embedding
    layers: tuple[Layer, ...]
    norm: RMSNorm
    head: Logits
    rotary: Rotary

    def forward(self, token_ids: Tensor, step: StepContext, rows: Tensor | None) -> Tensor:
        """See CausalModel. The last layer works on the wanted rows alone once KV is written."""
        residual = self.embedding(token_ids)
        x = self.layers[0].input_norm(residual)
        last = len(self.layers) - 1
        for i, layer in enumerate(self.layers):
            attended = layer.attention(x, step)
            if i == last and rows is not None:
                attended, residual = attended[rows], residual[rows]
            x = layer.post_norm.add(layer.attention.out(attended), residual)
            following = self.norm if i == last else self.layers[i + 1].input_norm
            x = following.add(layer.mlp(x), residual)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """See CausalModel."""
        return self.head(hidden)
