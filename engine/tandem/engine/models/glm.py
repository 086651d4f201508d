"""GLM-4: a part of each head is rotated in pairs of neighbours, gate and up are one tensor; with or
without norms after attention and MLP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tandem.engine.config import ModelFacts
from tandem.engine.loader import LinearPart, Weights
from tandem.engine.models.decoder import Decoder, DecoderLayer
from tandem.engine.models.gemma import SandwichLayer
from tandem.engine.models.projections import ProjectionBuilder


@dataclass(frozen=True, slots=True)
class GlmBuilder(ProjectionBuilder):
    """Builder of a GlmForCausalLM."""

    interleaved: ClassVar[bool] = True

    def gate_up_parts(self, prefix: str, inner: int) -> list[LinearPart]:
        return self.fused(f"{prefix}.gate_up_proj", (inner, inner))


@dataclass(frozen=True, slots=True)
class Glm4Builder(GlmBuilder):
    """Builder of a Glm4ForCausalLM."""

    def layer(self, index: int) -> DecoderLayer:
        prefix, hidden = f"{self.prefix}layers.{index}", self.facts.hidden_size
        return SandwichLayer(
            input_norm=self.norm(f"{prefix}.input_layernorm", hidden),
            attention=self.attention(index, f"{prefix}.self_attn"),
            attention_norm=self.norm(f"{prefix}.post_self_attn_layernorm", hidden),
            mlp_input_norm=self.norm(f"{prefix}.post_attention_layernorm", hidden),
            mlp=self.mlp(f"{prefix}.mlp"),
            mlp_norm=self.norm(f"{prefix}.post_mlp_layernorm", hidden),
        )


def load(facts: ModelFacts, weights: Weights) -> Decoder:
    """Load the model with its weights. Raises a LoadError."""
    builder = Glm4Builder if facts.architecture.startswith("Glm4") else GlmBuilder
    return builder.of(facts, weights).build()
