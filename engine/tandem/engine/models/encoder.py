"""The encoder that the served families share: learned positions, post-norm, attention both ways.

BERT's layers (Devlin et al., 2018). A prompt is computed whole in one step and nothing of it is
kept. Families differ in the head that classifies, which their builders make.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor
from torch.nn.functional import gelu, linear, relu

from tandem.engine.config import ModelFacts
from tandem.engine.layers.linear import Embedding, LayerNorm, Linear
from tandem.engine.layers.rotary import Rotary
from tandem.engine.models.base import StepContext
from tandem.engine.models.decoder import activated

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": gelu,
    "gelu_new": partial(gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(gelu, approximate="tanh"),
    "relu": relu,
}
"""Activations by hidden_act."""


@dataclass(frozen=True, slots=True)
class Embeddings:
    """Token, position and type of each token, summed and normed."""

    words: Embedding
    positions: Tensor
    """[positions, hidden], the row of a prompt's first token first."""
    types: Tensor
    """[types, hidden]."""
    norm: LayerNorm

    def __call__(self, token_ids: Tensor, step: StepContext) -> Tensor:
        """Embed int64 [tokens] to [tokens, hidden]."""
        summed = self.words(token_ids).add_(self.positions.index_select(0, step.positions))
        if step.token_types is None:
            summed.add_(self.types[0])
        else:
            summed.add_(self.types.index_select(0, step.token_types))
        return self.norm(summed)


@dataclass(frozen=True, slots=True)
class EncoderLayer:
    """One block: attention and MLP, a norm after each."""

    qkv: Linear
    attention_out: Linear
    attention_norm: LayerNorm
    up: Linear
    activation: Callable[[Tensor], Tensor]
    down: Linear
    out_norm: LayerNorm
    num_heads: int

    def __call__(self, stream: Tensor, step: StepContext) -> Tensor:
        """Map [tokens, hidden] to the same."""
        projected = self.qkv(stream, step.rows)
        q, k, v = projected.view(len(stream), 3, self.num_heads, -1).unbind(1)
        attended = step.attention.whole(q, k, v, step.prompts).flatten(1)
        stream = self.attention_norm.of_sum(self.attention_out(attended, step.rows), stream)
        inner = self.activation(self.up(stream, step.rows))
        return self.out_norm.of_sum(self.down(inner, step.rows), stream)


@dataclass(frozen=True, slots=True)
class ClassificationHead:
    """Scores by way of a layer with tanh: out(tanh(dense(state))), in float32."""

    dense: tuple[Tensor, Tensor]
    """Weight [hidden, hidden] and bias, float32."""
    out: tuple[Tensor, Tensor]
    """Weight [labels, hidden] and bias, float32."""

    def __call__(self, states: Tensor) -> Tensor:
        """Map float32 [rows, hidden] to float32 [rows, labels]."""
        return linear(linear(states, *self.dense).tanh(), *self.out)


@dataclass(frozen=True, slots=True)
class Encoder:
    """A whole model of one rank. Implements CausalModel."""

    facts: ModelFacts
    embeddings: Embeddings
    layers: tuple[EncoderLayer, ...]
    head: ClassificationHead | None
    """Head of the labels; None if the model has no labels."""
    projection: Tensor | None = None
    """Projection of states to tokens' vectors, float32 [values, hidden]; None keeps the states."""

    @property
    def rotary(self) -> Rotary | None:
        """See CausalModel: positions have a table."""
        return None

    def forward(self, token_ids: Tensor, step: StepContext, rows: Tensor | None) -> Tensor:
        """See CausalModel."""
        stream = self.embeddings(token_ids, step)
        for layer in self.layers:
            stream = layer(stream, step)
        return stream if rows is None else stream.index_select(0, rows)

    def shortened(self, layers: int) -> Encoder:
        """See CausalModel; layers are alike, so that one is enough."""
        return replace(self, layers=self.layers[-1:])

    def logits(self, hidden: Tensor) -> Tensor:
        """See CausalModel."""
        raise AssertionError("an encoder has no head for tokens, and is asked for none")

    def token_vectors(self, hidden: Tensor) -> Tensor:
        """See CausalModel."""
        return hidden if self.projection is None else linear(hidden, self.projection)

    def classify(self, hidden: Tensor) -> Tensor:
        """See CausalModel."""
        assert self.head is not None, "a model without labels is not asked for them"
        return self.head(hidden)

    def probabilities(self, scores: Tensor) -> Tensor:
        """See CausalModel."""
        return activated(scores, self.facts.pooling.activation)
