"""Assembling an encoder from the tensors of a checkpoint, under BERT's names.

A family is a subclass with its prefix and its classification head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from tandem.engine.config import ModelFacts
from tandem.engine.config.encoder import EncoderFacts
from tandem.engine.layers.linear import Embedding, LayerNorm, Linear
from tandem.engine.loader import Weights
from tandem.engine.models.encoder import (
    ACTIVATIONS,
    ClassificationHead,
    Embeddings,
    Encoder,
    EncoderLayer,
)
from tandem.engine.quant import LinearMethod, LinearPart, method_of, select_method

WORDS = "embeddings.word_embeddings.weight"


@dataclass(frozen=True, slots=True)
class EncoderBuilder:
    """Reads one model. ``build`` is called once."""

    name: ClassVar[str]
    """Prefix of the names of all but the heads, in checkpoints that have a head."""
    unread: ClassVar[tuple[str, ...]]
    """Tensors of heads that are not computed, in addition to derived ones."""

    facts: ModelFacts
    encoder: EncoderFacts
    weights: Weights
    method: LinearMethod

    @classmethod
    def of(cls, facts: ModelFacts, weights: Weights) -> Self:
        """Return a builder with the form of weights that checkpoint and device have."""
        assert facts.encoder is not None, "the family's facts are of an encoder"
        plain = select_method(weights.device, weights.dtype)
        method = method_of(facts.quantization, plain, weights.device)
        return cls(facts, facts.encoder, weights, method)

    @property
    def prefix(self) -> str:
        """Return the prefix of the names of all but the heads."""
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
        """Return the three tables and their norm."""
        facts, encoder, hidden = self.facts, self.encoder, self.facts.hidden_size
        prefix = f"{self.prefix}embeddings"
        rows = (encoder.num_positions, hidden)
        positions = self.weights.get(f"{prefix}.position_embeddings.weight", rows)
        types = (encoder.num_token_types, hidden)
        return Embeddings(
            words=Embedding(self.weights.get(f"{self.prefix}{WORDS}", (facts.vocab_size, hidden))),
            positions=positions[encoder.position_offset :],
            types=self.weights.get(f"{prefix}.token_type_embeddings.weight", types).clone(),
            norm=self.norm(f"{prefix}.LayerNorm"),
        )

    def layer(self, index: int) -> EncoderLayer:
        """Return one block."""
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
        """Return the head that computes scores from the first token's state."""
        raise NotImplementedError

    def projection(self) -> Tensor | None:
        """Return the matrix that projects states to tokens' vectors; None if there is none."""
        if self.encoder.token_values is None:
            return None
        shape = (self.encoder.token_values, self.facts.hidden_size)
        return self.weights.get("linear.weight", shape, dtype=torch.float32).clone()

    def linear(self, prefixes: list[str], outputs: int, width: int) -> Linear:
        """Return the merged layer of parts that have ``outputs`` each, with biases."""
        parts = [LinearPart(prefix, (outputs, width), True) for prefix in prefixes]
        return Linear.load(self.method, self.weights, parts)

    def norm(self, prefix: str) -> LayerNorm:
        """Return the norm of ``prefix``.weight and .bias [hidden]."""
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
