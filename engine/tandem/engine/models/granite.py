"""Granite: outputs of attention and MLP are multiplied before they are added to the stream."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tandem.engine.config import ModelFacts
from tandem.engine.layers.linear import RMSNorm
from tandem.engine.loader import Weights
from tandem.engine.models.decoder import MLP, Block, Decoder
from tandem.engine.models.registry import DecoderBuilder
from tandem.engine.quant import Rows


@dataclass(frozen=True, slots=True)
class ScaledLayer(Block):
    """Block that adds multiples of its outputs."""

    post_norm: RMSNorm
    mlp: MLP
    factor: float

    def _add(self, stream: Tensor, attended: Tensor, rows: Rows) -> Tensor:
        stream.add_(self.attention.out(attended, rows), alpha=self.factor)
        inner = self.mlp.inner(stream, self.post_norm, rows)
        return stream.add_(self.mlp.down(inner, rows), alpha=self.factor)


@dataclass(frozen=True, slots=True)
class GraniteBuilder(DecoderBuilder):
    """Builder of one model."""

    def layer(self, index: int) -> ScaledLayer:
        prefix, hidden = f"{self.prefix}layers.{index}", self.facts.hidden_size
        return ScaledLayer(
            input_norm=self.norm(f"{prefix}.input_layernorm", hidden),
            attention=self.attention(index, f"{prefix}.self_attn"),
            post_norm=self.norm(f"{prefix}.post_attention_layernorm", hidden),
            mlp=self.mlp(f"{prefix}.mlp"),
            factor=self.facts.multipliers.residual,
        )


def load(facts: ModelFacts, weights: Weights) -> Decoder:
    """Load the model with its weights. Raises a LoadError."""
    return GraniteBuilder.of(facts, weights).build()
