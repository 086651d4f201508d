"""The decoder that the served families share: pre-norm, RoPE, grouped queries, gated MLP.

Families differ in a few facts (biases, norms of q and k) and are small files beside this one. The
residual stream is one tensor that products add to in place; norms go along with the products that
read them, so that a form of weights may fold them in.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.engine.config import ModelFacts
from tandem.engine.layers.embedding import Embedding
from tandem.engine.layers.linear import Linear
from tandem.engine.layers.logits import Logits
from tandem.engine.layers.norm import RMSNorm
from tandem.engine.layers.rotary import Rotary
from tandem.engine.models.base import StepContext
from tandem.kernels.rotary_kv import QKNorm, rotary_kv


@dataclass(frozen=True, slots=True)
class Attention:
    """Projection, rotation and KV write, attention, projection back."""

    index: int
    qkv: Linear
    out: Linear
    head_dim: int
    qk_norm: QKNorm | None

    def __call__(self, stream: Tensor, norm: RMSNorm, step: StepContext) -> Tensor:
        """The stream [tokens, hidden], normed, to [tokens, heads * head_dim], before ``out``."""
        kv = step.kv[self.index]
        qkv = self.qkv.of_norm(stream, norm).view(stream.shape[0], -1, self.head_dim)
        q = rotary_kv(qkv, kv, step.rotation, step.slots, self.qk_norm)
        return step.attention.forward(q, kv, step.metadata).flatten(1)


@dataclass(frozen=True, slots=True)
class MLP:
    """down(silu(gate(x)) * up(x))."""

    gate_up: Linear
    down: Linear

    def __call__(self, stream: Tensor, norm: RMSNorm) -> Tensor:
        """Add to the stream [tokens, hidden] what comes of it, normed."""
        return self.down.add_to(stream, self.gate_up.gated_of_norm(stream, norm))


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
    stream_dtype: torch.dtype
    """Of the residual stream: that of the weights, or float32."""

    def forward(self, token_ids: Tensor, step: StepContext, rows: Tensor | None) -> Tensor:
        """See CausalModel. The last layer works on the wanted rows alone once KV is written."""
        stream = self.embedding(token_ids).to(self.stream_dtype)
        last = self.layers[-1]
        for layer in self.layers:
            attended = layer.attention(stream, layer.input_norm, step)
            if layer is last and rows is not None:
                attended, stream = attended[rows], stream[rows]
            stream = layer.attention.out.add_to(stream, attended)
            stream = layer.mlp(stream, layer.post_norm)
        return self.norm(stream)

    def logits(self, hidden: Tensor) -> Tensor:
        """See CausalModel."""
        return self.head(hidden)
