"""Phi-3 and Phi-4: q, k and v in one tensor, gate and up in another."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.engine.config import ModelFacts
from tandem.engine.loader import LinearPart, Weights
from tandem.engine.models.decoder import Decoder
from tandem.engine.models.projections import ProjectionBuilder


@dataclass(frozen=True, slots=True)
class PhiBuilder(ProjectionBuilder):
    """Builder of one model."""

    def qkv_parts(self, prefix: str) -> list[LinearPart]:
        facts, dim = self.facts, self.facts.head_dim
        outs = (facts.num_heads * dim, facts.num_kv_heads * dim, facts.num_kv_heads * dim)
        return self.fused(f"{prefix}.qkv_proj", outs)

    def gate_up_parts(self, prefix: str, inner: int) -> list[LinearPart]:
        return self.fused(f"{prefix}.gate_up_proj", (inner, inner))


def load(facts: ModelFacts, weights: Weights) -> Decoder:
    """Load the model with its weights. Raises a LoadError."""
    return PhiBuilder.of(facts, weights).build()
