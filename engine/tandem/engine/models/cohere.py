"""Command R7B and Command A: attention and MLP of one norm, added together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from tandem.engine.config import ModelFacts
from tandem.engine.loader import Weights
from tandem.engine.models.decoder import MLP, Block, Decoder
from tandem.engine.models.separate import CenteredBuilder
from tandem.engine.quant import Rows


@dataclass(frozen=True, slots=True)
class ParallelLayer(Block):
    """Block whose MLP has the norm of its attention."""

    mlp: MLP

    def _add(self, stream: Tensor, attended: Tensor, rows: Rows) -> Tensor:
        inner = self.mlp.inner(stream, self.input_norm, rows)
        stream = self.attention.out.add_to(stream, attended, rows)
        return self.mlp.down.add_to(stream, inner, rows)


@dataclass(frozen=True, slots=True)
class CohereBuilder(CenteredBuilder):
    """Builder of one model."""

    interleaved: ClassVar[bool] = True

    def layer(self, index: int) -> ParallelLayer:
        prefix = f"{self.prefix}layers.{index}"
        return ParallelLayer(
            input_norm=self.norm(f"{prefix}.input_layernorm", self.facts.hidden_size),
            attention=self.attention(index, f"{prefix}.self_attn"),
            mlp=self.mlp(f"{prefix}.mlp"),
        )


def load(facts: ModelFacts, weights: Weights) -> Decoder:
    """Load the model with its weights. Raises a LoadError."""
    return CohereBuilder.of(facts, weights).build()
