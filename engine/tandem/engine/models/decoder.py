"""Decoder that the served families share: pre-norm, RoPE, grouped queries, gated MLP.

Products add to the residual stream in place, and get the norm before them, so that a form of
weights may fold it in.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear

from tandem.engine.attention import Metadata
from tandem.engine.config import ModelFacts
from tandem.engine.layers.linear import Embedding, Linear, LMHead, RMSNorm
from tandem.engine.layers.rotary import Rotary
from tandem.engine.models.base import EmbeddedTokens, StagedVectors, StepContext
from tandem.engine.quant import Rows
from tandem.kernels.activation import Gate
from tandem.kernels.attention.batch import Scores
from tandem.kernels.rotary_kv import QKNorm, Rotation, rotary_kv, rotary_q
from tandem.protocol.card import KVKind
from tandem.protocol.pooling import Activation


class Mixer(Protocol):
    """Part of a layer that passes data between tokens."""

    @property
    def kind(self) -> KVKind:
        """Return the kind of its KV."""
        ...

    @property
    def out(self) -> Linear:
        """Return the projection back to the stream."""
        ...

    def __call__(self, stream: Tensor, norm: RMSNorm, step: StepContext) -> Tensor:
        """Write the step's KV; return [tokens, width of ``out``] of the normed stream."""
        ...

    def of_rows(self, stream: Tensor, norm: RMSNorm, step: StepContext, rows: Tensor) -> Tensor:
        """Write the step's KV; return the result of ``rows`` [num_logits] only."""
        ...


@dataclass(frozen=True, slots=True)
class Attention:
    """Projection, rotation and KV write, attention, projection back."""

    index: int
    group: int
    """Number of its group of the KV layout."""
    scores: Scores
    rope: int
    """Number of its rotary embedding."""
    qkv: Linear
    parts: tuple[Linear, Linear] | None
    """``qkv`` cut into q, and k and v; None if its form cannot be cut."""
    out: Linear
    head_dim: int
    qk_norm: QKNorm | None

    @property
    def kind(self) -> KVKind:
        return KVKind.FULL if self.scores.window is None else KVKind.WINDOW

    def __call__(self, stream: Tensor, norm: RMSNorm, step: StepContext) -> Tensor:
        """Return the attention of the normed stream [tokens, hidden] before ``out``: [tokens, heads
        * head_dim]."""
        q = self._write(self.qkv.of_norm(stream, norm, step.rows), step)
        meta = step.metadata(self.group)
        return self._attend(q, meta, step)

    def of_rows(self, stream: Tensor, norm: RMSNorm, step: StepContext, rows: Tensor) -> Tensor:
        """Write the KV of all tokens; return the attention of ``rows`` [num_logits] only."""
        queries = step.metadata(self.group).logits_rows
        if queries is None:
            return self(stream, norm, step).index_select(0, rows)
        normed = norm(stream)
        if self.parts is None:
            q = self._write(self.qkv(normed, step.rows), step).index_select(0, rows)
        else:
            of_q, of_kv = self.parts
            self._write(of_kv(normed, step.rows), step)
            q = self._heads(of_q(normed.index_select(0, rows), step.rows_at(rows)))
            angles = step.rotation(self.rope)
            rotation = Rotation(*(each.index_select(0, rows) for each in angles))
            q = rotary_q(q, rotation, self.qk_norm)
        if not rows.shape[0]:
            return q.flatten(1)
        return self._attend(q, queries, step)

    def _attend(self, q: Tensor, meta: Metadata, step: StepContext) -> Tensor:
        kv, scales = step.kv[self.index], step.kv_scales.get(self.index)
        return step.attention.forward(q, kv, meta, self.scores, scales).flatten(1)

    def _write(self, projected: Tensor, step: StepContext) -> Tensor:
        """Write KV of [tokens, (heads + 2 * kv_heads) * head_dim]; return q [tokens, heads,
        head_dim]."""
        kv, rotation = step.kv[self.index], step.rotation(self.rope)
        slots, scales = step.slots(self.group), step.kv_scales.get(self.index)
        return rotary_kv(self._heads(projected), kv, rotation, slots, self.qk_norm, scales)

    def _heads(self, projected: Tensor) -> Tensor:
        return projected.view(len(projected), projected.shape[1] // self.head_dim, self.head_dim)


@dataclass(frozen=True, slots=True)
class MLP:
    """down(activation(gate(x)) * up(x))."""

    gate_up: Linear
    down: Linear
    gate: Gate = Gate.SILU

    def __call__(self, stream: Tensor, norm: RMSNorm, rows: Rows) -> Tensor:
        """Add the MLP's output for the normed stream to the stream [tokens, hidden]."""
        return self.gate_up.feed_forward(self.down, stream, stream, norm, rows, self.gate)

    def inner(self, stream: Tensor, norm: RMSNorm, rows: Rows) -> Tensor:
        """Return the input of ``down`` for the normed stream: [tokens, width of ``down``]."""
        return self.gate_up.gated_of_norm(stream, norm, rows, self.gate)


class FeedForward(Protocol):
    """Part of a layer that computes each token on its own."""

    def __call__(self, stream: Tensor, norm: RMSNorm, rows: Rows) -> Tensor:
        """Add the output for the normed stream to the stream [tokens, hidden]; return it."""
        ...


class DecoderLayer(Protocol):
    """One block of a decoder."""

    @property
    def kind(self) -> KVKind:
        """Return the kind of its KV."""
        ...

    @property
    def mlp(self) -> FeedForward:
        """Return the part after the mixer."""
        ...

    def __call__(self, stream: Tensor, step: StepContext) -> Tensor:
        """Add to the stream [tokens, hidden]."""
        ...

    def of_rows(self, stream: Tensor, step: StepContext, rows: Tensor) -> Tensor:
        """Write the KV of the whole stream; return its ``rows`` [num_logits] with the layer's
        output added."""
        ...


@dataclass(frozen=True, slots=True)
class Block:
    """Block that begins with a norm and a mixer; subclasses add the rest. Implements
    DecoderLayer."""

    input_norm: RMSNorm
    attention: Mixer

    @property
    def kind(self) -> KVKind:
        return self.attention.kind

    def __call__(self, stream: Tensor, step: StepContext) -> Tensor:
        return self._add(stream, self.attention(stream, self.input_norm, step), step.rows)

    def of_rows(self, stream: Tensor, step: StepContext, rows: Tensor) -> Tensor:
        attended = self.attention.of_rows(stream, self.input_norm, step, rows)
        stream = stream.index_select(0, rows)
        return self._add(stream, attended, step.rows_at(rows)) if rows.shape[0] else stream

    def _add(self, stream: Tensor, attended: Tensor, rows: Rows) -> Tensor:
        """Add the mixer's output for ``attended``, then the MLP's, to the stream in place."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Layer(Block):
    """Block with a norm before its MLP or its experts."""

    post_norm: RMSNorm
    mlp: FeedForward

    def _add(self, stream: Tensor, attended: Tensor, rows: Rows) -> Tensor:
        stream = self.attention.out.add_to(stream, attended, rows)
        return self.mlp(stream, self.post_norm, rows)


@dataclass(frozen=True, slots=True)
class Decoder:
    """A whole model of one rank. Implements CausalModel."""

    facts: ModelFacts
    embedding: Embedding
    layers: tuple[DecoderLayer, ...]
    norm: RMSNorm
    head: LMHead
    rotaries: tuple[Rotary, ...]
    stream_dtype: torch.dtype
    """Type of the residual stream: that of the weights, or float32."""
    classifier: Tensor | None = None
    """Classifier, float32 [labels, hidden]; None if the model has no labels."""

    def forward(self, token_ids: Tensor, step: StepContext, rows: Tensor | None) -> Tensor:
        """Compute all KV; the last layer computes the rows for the head only."""
        stream = self.embedding(token_ids).to(self.stream_dtype)
        for embedded in step.given(EmbeddedTokens):
            embedded.put(stream)
        for staged in step.given(StagedVectors):
            staged.put(stream)
        if self.facts.multipliers.embedding != 1.0:
            stream.mul_(self.facts.multipliers.embedding)
        *layers, last = self.layers
        near = step.on_last_layers
        at = len(layers) if near is None else max(0, len(self.layers) - near.layers_left)
        for layer in layers[:at]:
            stream = layer(stream, step)
        if near is not None:
            near.note()
        for layer in layers[at:]:
            stream = layer(stream, step)
        stream = last(stream, step) if rows is None else last.of_rows(stream, step, rows)
        return self.norm(stream)

    def shortened(self, layers: int) -> Decoder:
        """Keep the last layer, which differs from the others (``of_rows``), and of those at least
        one of each kind, with an MLP and with experts."""
        of_kind = {(each.kind, type(each.mlp)): i for i, each in enumerate(self.layers[:-1])}
        kept = {*range(len(self.layers))[-layers:], *of_kind.values()}
        return replace(self, layers=tuple(self.layers[i] for i in sorted(kept)))

    def logits(self, hidden: Tensor) -> Tensor:
        found, factor = self.head(hidden), self.facts.multipliers.logits
        return found if factor == 1.0 else found.mul_(factor)

    def token_vectors(self, hidden: Tensor) -> Tensor:
        return hidden

    def classify(self, hidden: Tensor) -> Tensor:
        assert self.classifier is not None, "a model without labels is not asked for them"
        return linear(hidden, self.classifier)

    def probabilities(self, scores: Tensor) -> Tensor:
        return activated(scores, self.facts.pooling.activation)


def activated(scores: Tensor, kind: Activation) -> Tensor:
    """Apply ``kind`` to float32 [rows, labels]."""
    if kind is Activation.SOFTMAX:
        return scores.softmax(-1)
    return scores.sigmoid() if kind is Activation.SIGMOID else scores
