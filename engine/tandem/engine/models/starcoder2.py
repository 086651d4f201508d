"""StarCoder2: LayerNorm with a shift, and an MLP without a gate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn.functional import gelu

from tandem.engine.config import ModelFacts
from tandem.engine.layers.linear import Linear, RMSNorm
from tandem.engine.loader import INPUTS, Weights
from tandem.engine.models.decoder import Decoder, FeedForward
from tandem.engine.models.separate import CenteredBuilder
from tandem.engine.quant import Rows


@dataclass(frozen=True, slots=True)
class UngatedMLP:
    """down(gelu(up(x))). Implements FeedForward."""

    up: Linear
    down: Linear

    def __call__(self, stream: Tensor, norm: RMSNorm, rows: Rows) -> Tensor:
        inner = gelu(self.up(norm(stream), rows), approximate="tanh")
        return self.down.add_to(stream, inner, rows)


@dataclass(frozen=True, slots=True)
class Starcoder2Builder(CenteredBuilder):
    """Builder of one model."""

    norm_bias: ClassVar[bool] = True

    def feed_forward(self, index: int, prefix: str) -> FeedForward:
        facts, bias = self.facts, self.facts.mlp_bias
        up = {f"{prefix}.mlp.c_fc": facts.intermediate_size}
        down = {f"{prefix}.mlp.c_proj": facts.hidden_size}
        return UngatedMLP(
            self.linear(up, facts.hidden_size, bias=bias),
            self.linear(down, facts.intermediate_size, bias=bias, dim=INPUTS),
        )


def load(facts: ModelFacts, weights: Weights) -> Decoder:
    """Load the model with its weights. Raises a LoadError."""
    return Starcoder2Builder.of(facts, weights).build()
