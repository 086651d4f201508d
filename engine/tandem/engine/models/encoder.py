"""Encoder that the served families share: learned positions, post-norm, bidirectional attention.

BERT's layers (Devlin et al., 2018). A prompt is computed whole in one step; nothing is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Self

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear, relu

from tandem.engine.config import ModelFacts
from tandem.engine.config.facts import EncoderFacts
from tandem.engine.layers.linear import Embedding, LayerNorm, Linear
from tandem.engine.layers.rotary import Rotary
from tandem.engine.loader import Weights
from tandem.engine.models.base import StepContext, TokenTypes
from tandem.engine.models.decoder import activated
from tandem.engine.quant import (
    LinearMethod,
    LinearPart,
    PlainMethod,
    method_of,
    select_method,
)
from tandem.engine.quant.tables import Table, table_of

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": gelu,
    "gelu_new": partial(gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(gelu, approximate="tanh"),
    "relu": relu,
}


@dataclass(frozen=True, slots=True)
class Embeddings:
    """Normed sum of the embeddings of token, position and type."""

    words: Embedding
    positions: Tensor
    """[positions, hidden], the row of a prompt's first token first."""
    types: Tensor
    """[types, hidden]."""
    norm: LayerNorm

    def __call__(self, token_ids: Tensor, step: StepContext) -> Tensor:
        """Embed int64 [tokens] to [tokens, hidden]."""
        summed = self.words(token_ids).add_(self.positions.index_select(0, step.positions))
        given = next(step.given(TokenTypes), None)
        if given is None:
            summed.add_(self.types[0])
        else:
            summed.add_(self.types.index_select(0, given.types))
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
    """Scores from out(tanh(dense(state))), in float32."""

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
    def rotaries(self) -> Sequence[Rotary]:
        return ()

    def forward(self, token_ids: Tensor, step: StepContext, rows: Tensor | None) -> Tensor:
        stream = self.embeddings(token_ids, step)
        for layer in self.layers:
            stream = layer(stream, step)
        return stream if rows is None else stream.index_select(0, rows)

    def shortened(self, layers: int) -> Encoder:
        """Keep at least one layer: all are alike."""
        return replace(self, layers=self.layers[-1:])

    def logits(self, hidden: Tensor) -> Tensor:
        raise AssertionError("an encoder has no head for tokens, and is asked for none")

    def token_vectors(self, hidden: Tensor) -> Tensor:
        return hidden if self.projection is None else linear(hidden, self.projection)

    def classify(self, hidden: Tensor) -> Tensor:
        assert self.head is not None, "a model without labels is not asked for them"
        return self.head(hidden)

    def probabilities(self, scores: Tensor) -> Tensor:
        return activated(scores, self.facts.pooling.activation)


WORDS = "embeddings.word_embeddings.weight"


@dataclass(frozen=True, slots=True)
class EncoderBuilder:
    """Builder of one model. ``build`` is called once."""

    name: ClassVar[str]
    """Prefix of the names of all but the heads, in checkpoints that have a head."""
    unread: ClassVar[tuple[str, ...]]
    """Tensors of heads that are not computed, in addition to derived ones."""

    facts: ModelFacts
    encoder: EncoderFacts
    weights: Weights
    method: LinearMethod
    plain: PlainMethod

    @classmethod
    def of(cls, facts: ModelFacts, weights: Weights) -> Self:
        """Return a builder with the form of weights that checkpoint and device have."""
        assert facts.encoder is not None, "the family's facts are of an encoder"
        plain = select_method(weights.device, weights.dtype)
        method = method_of(facts.quantization, plain, weights.device)
        return cls(facts, facts.encoder, weights, method, plain)

    @property
    def prefix(self) -> str:
        return f"{self.name}." if f"{self.name}.{WORDS}" in self.weights else ""

    def build(self) -> Encoder:
        """Build the model from every tensor of the checkpoint. Raises a LoadError."""
        model = Encoder(
            facts=self.facts,
            embeddings=self.embeddings(),
            layers=tuple(self.layer(index) for index in range(self.facts.num_layers)),
            head=self.head() if self.facts.pooling.labels else None,
            projection=self.projection(),
        )
        ids = ("*embeddings.position_ids", "*embeddings.token_type_ids")
        self.weights.check_all_used(ignore=(*ids, *self.unread))
        return model

    def embeddings(self) -> Embeddings:
        encoder, hidden = self.encoder, self.facts.hidden_size
        prefix = f"{self.prefix}embeddings"
        rows = (encoder.num_positions, hidden)
        positions = self.weights.get(f"{prefix}.position_embeddings.weight", rows)
        types = (encoder.num_token_types, hidden)
        return Embeddings(
            words=Embedding(self.words()),
            positions=positions[encoder.position_offset :],
            types=self.weights.get(f"{prefix}.token_type_embeddings.weight", types).clone(),
            norm=self.norm(f"{prefix}.LayerNorm"),
        )

    def words(self) -> Table:
        shape = (self.facts.vocab_size, self.facts.hidden_size)
        name = f"{self.prefix}{WORDS}"
        return table_of(self.facts.quantization, self.plain, self.weights, name, shape)

    def layer(self, index: int) -> EncoderLayer:
        facts, prefix = self.facts, f"{self.prefix}encoder.layer.{index}"
        hidden, inner = facts.hidden_size, facts.intermediate_size
        qkv = [f"{prefix}.attention.self.{each}" for each in ("query", "key", "value")]
        return EncoderLayer(
            qkv=self.linear(qkv, hidden, hidden),
            attention_out=self.linear([f"{prefix}.attention.output.dense"], hidden, hidden),
            attention_norm=self.norm(f"{prefix}.attention.output.LayerNorm"),
            up=self.linear([f"{prefix}.intermediate.dense"], inner, hidden),
            activation=ACTIVATIONS[facts.hidden_act],
            down=self.linear([f"{prefix}.output.dense"], hidden, inner),
            out_norm=self.norm(f"{prefix}.output.LayerNorm"),
            num_heads=facts.num_heads,
        )

    def head(self) -> ClassificationHead:
        raise NotImplementedError

    def projection(self) -> Tensor | None:
        """Return the matrix that projects states to tokens' vectors, or None."""
        if self.encoder.token_values is None:
            return None
        shape = (self.encoder.token_values, self.facts.hidden_size)
        return self.weights.get("linear.weight", shape, dtype=torch.float32).clone()

    def linear(self, prefixes: list[str], outputs: int, width: int) -> Linear:
        """Return the merged layer of parts with ``outputs`` each, with biases."""
        parts = [LinearPart(prefix, (outputs, width), True) for prefix in prefixes]
        return Linear.load(self.method, self.weights, parts)

    def norm(self, prefix: str) -> LayerNorm:
        width = (self.facts.hidden_size,)
        gain, shift = (
            self.weights.get(self.one_of(prefix, *names), width)
            for names in (("weight", "gamma"), ("bias", "beta"))
        )
        return LayerNorm(gain.clone(), shift.clone(), self.encoder.layer_norm_eps)

    def one_of(self, prefix: str, name: str, older: str) -> str:
        """Return the tensor's name; BERT's first checkpoints have TensorFlow's."""
        usual = f"{prefix}.{name}"
        old = f"{prefix}.{older}"
        return old if usual not in self.weights and old in self.weights else usual

    def in_float32(self, prefix: str, outputs: int) -> tuple[Tensor, Tensor]:
        """Return the weight [outputs, hidden] and bias of a layer of the head."""
        shape = (outputs, self.facts.hidden_size)
        weight = self.weights.get(f"{prefix}.weight", shape, dtype=torch.float32)
        bias = self.weights.get(f"{prefix}.bias", (outputs,), dtype=torch.float32)
        return weight.clone(), bias.clone()
