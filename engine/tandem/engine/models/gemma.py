"""Gemma 3: norms before and after attention and MLP, and scaled embeddings."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.engine.config import ModelFacts
from tandem.engine.layers.linear import Embedding, RMSNorm
from tandem.engine.loader import Weights
from tandem.engine.models.decoder import MLP, Block, Decoder
from tandem.engine.models.registry import OffsetNormBuilder
from tandem.engine.quant import Rows
from tandem.engine.quant.tables import Table


@dataclass(frozen=True, slots=True)
class SandwichLayer(Block):
    """Block whose attention and MLP are normed before they are added."""

    attention_norm: RMSNorm
    mlp_input_norm: RMSNorm
    mlp: MLP
    mlp_norm: RMSNorm

    def _add(self, stream: Tensor, attended: Tensor, rows: Rows) -> Tensor:
        stream.add_(self.attention_norm(self.attention.out(attended, rows)))
        inner = self.mlp.inner(stream, self.mlp_input_norm, rows)
        return stream.add_(self.mlp_norm(self.mlp.down(inner, rows)))


@dataclass(frozen=True, slots=True)
class GemmaBuilder(OffsetNormBuilder):
    """Builder of one model."""

    def embedding(self, table: Table) -> Embedding:
        """Return the embedding times the root of the hidden size, rounded to the model's type."""
        factor = torch.tensor(self.facts.hidden_size**0.5, dtype=self.weights.dtype)
        return Embedding(table, factor.item(), ranks=self.weights.ranks)

    def layer(self, index: int) -> SandwichLayer:
        prefix, hidden = f"{self.prefix}layers.{index}", self.facts.hidden_size
        return SandwichLayer(
            input_norm=self.norm(f"{prefix}.input_layernorm", hidden),
            attention=self.attention(index, f"{prefix}.self_attn"),
            attention_norm=self.norm(f"{prefix}.post_attention_layernorm", hidden),
            mlp_input_norm=self.norm(f"{prefix}.pre_feedforward_layernorm", hidden),
            mlp=self.mlp(f"{prefix}.mlp"),
            mlp_norm=self.norm(f"{prefix}.post_feedforward_layernorm", hidden),
        )


def load(facts: ModelFacts, weights: Weights) -> Decoder:
    """Load the model with its weights. Raises a LoadError."""
    return GemmaBuilder.of(facts, weights).build()
