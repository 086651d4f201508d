"""Loads a model by its architecture."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Self, cast

import torch
from torch import Tensor

from tandem.engine.config import ModelFacts, kv_scales
from tandem.engine.config.facts import RopeFacts
from tandem.engine.config.families import check_servable, family_of
from tandem.engine.config.layout import layer_groups
from tandem.engine.layers.linear import (
    Embedding,
    Linear,
    LMHead,
    RMSNorm,
)
from tandem.engine.layers.rotary import Rotary
from tandem.engine.loader import INPUTS, OUTPUTS, WHOLE, Shard, Weights
from tandem.engine.models.base import CausalModel
from tandem.engine.models.decoder import (
    MLP,
    Attention,
    Decoder,
    DecoderLayer,
    FeedForward,
    Layer,
    Mixer,
)
from tandem.engine.quant import (
    LinearMethod,
    LinearPart,
    PlainMethod,
    method_of,
    select_method,
)
from tandem.engine.quant.tables import Table, table_of
from tandem.kernels.activation import Gate
from tandem.kernels.attention.batch import Scores
from tandem.kernels.rotary_kv import QKNorm
from tandem.protocol.card import KVKind

DERIVED = ("*.rotary_emb.inv_freq", "*.attn.bias", "*.masked_bias", *kv_scales.IGNORED)
"""Tensors in some checkpoints that follow from config.json, or are read with it."""
PREFIX = "model."
NARROW = 2048
"""Hidden size up to which the residual stream is float32; see docs/performance.md."""


_GATES = {"silu": Gate.SILU, "swish": Gate.SILU, "gelu_pytorch_tanh": Gate.GELU_TANH}


@dataclass(frozen=True, slots=True)
class DecoderBuilder:
    """Builder of one decoder; subclasses override attention, MLP and layers."""

    facts: ModelFacts
    weights: Weights
    method: LinearMethod
    """Method of the form that the checkpoint's layers have."""
    plain: PlainMethod
    """Method of weights that are plain in any form: the head's."""
    groups: Mapping[int, int]
    """Group of the KV layout by layer."""
    attention_type: ClassVar[type[Attention]] = Attention
    mlp_type: ClassVar[type[MLP]] = MLP

    @classmethod
    def of(cls, facts: ModelFacts, weights: Weights) -> Self:
        """Return a builder with the form of weights that checkpoint and device have."""
        plain = select_method(weights.device, weights.dtype)
        method = method_of(facts.quantization, plain, weights.device)
        groups = layer_groups(facts, block_size=1, dtype="float32")
        numbers = {layer: i for i, each in enumerate(groups) for layer in each.layers}
        return cls(facts, weights, method, plain, numbers)

    @property
    def prefix(self) -> str:
        """Return the prefix of the names of all but the heads; "" if saved without a head."""
        return PREFIX if f"{PREFIX}embed_tokens.weight" in self.weights else ""

    @property
    def unread(self) -> tuple[str, ...]:
        """Return the patterns of tensors of parts that are not computed."""
        return ()

    def build(self) -> Decoder:
        """Build the model from every tensor of the checkpoint. Raises a LoadError."""
        facts, weights = self.facts, self.weights
        head_name = f"{self.prefix}embed_tokens.weight"
        table = self.vocabulary(head_name)
        layers = tuple(self.layer(i) for i in range(facts.num_layers))
        norm = self.norm(f"{self.prefix}norm", facts.hidden_size)
        head, classifier = table, None
        tied = facts.tie_word_embeddings or not facts.pooling.generates
        if facts.pooling.labels and not facts.pooling.label_tokens:
            shape = (len(facts.pooling.labels), facts.hidden_size)
            classifier = weights.get("score.weight", shape, dtype=torch.float32).clone()
        if not tied:
            head_name = "lm_head.weight"
            head = self.vocabulary(head_name)
        if facts.pooling.label_tokens:
            whole = head if weights.ranks.size == 1 else self.vocabulary(head_name, WHOLE)
            ids = torch.tensor(facts.pooling.label_tokens).to(weights.device)
            rows = whole.lookup(ids).float()
            classifier = (rows[:1] - rows[1:].sum(0)) * facts.multipliers.logits
        model = Decoder(
            facts=facts,
            embedding=self.embedding(table),
            layers=layers,
            norm=norm,
            head=LMHead(Linear(head.product()), facts.vocab_size, ranks=weights.ranks),
            rotaries=self.rotaries(),
            stream_dtype=torch.float32 if facts.hidden_size <= NARROW else weights.dtype,
            classifier=classifier,
        )
        copies = ("lm_head.weight",) if tied else ()
        weights.check_all_used(ignore=(*DERIVED, *copies, *self.unread))
        return model

    def rotaries(self) -> tuple[Rotary, ...]:
        """Return the rotary embeddings: that of the model, then those of its windows and of layers
        without rotation, if it has such."""
        facts = [self.facts]
        if self.facts.local_rope is not None:
            facts.append(replace(self.facts, rope=self.facts.local_rope))
        if self.facts.unrotated_layers:
            facts.append(replace(self.facts, rope=RopeFacts(partial=0.0)))
        dtype, device = self.weights.dtype, self.weights.device
        return tuple(Rotary(each, dtype=dtype, device=device) for each in facts)

    def rope(self, index: int) -> int:
        """Return the number of layer ``index``'s rotary embedding."""
        facts = self.facts
        if index in facts.unrotated_layers:
            return 1 if facts.local_rope is None else 2
        return int(facts.local_rope is not None and facts.kinds[index] is KVKind.WINDOW)

    def scores(self, index: int) -> Scores:
        """Return how layer ``index`` scores its keys."""
        facts = self.facts
        window = facts.sliding_window if facts.kinds[index] is KVKind.WINDOW else None
        scale = facts.attention_scale
        sinks = None
        if facts.attention_sinks:
            name, own = f"{self.prefix}layers.{index}.self_attn.sinks", self.weights.shard(OUTPUTS)
            sinks = self.weights.get(name, (facts.num_heads,), own, dtype=torch.float32).clone()
        return Scores(facts.head_dim**-0.5 if scale is None else scale, window, sinks=sinks)

    def vocabulary(self, name: str, shard: Shard | None = None) -> Table:
        """Return the rows of a tensor [vocabulary, hidden] in ``shard``; None is this rank's."""
        shape = (self.facts.vocab_size, self.facts.hidden_size)
        own = self.weights.shard(OUTPUTS, uneven=True) if shard is None else shard
        return table_of(self.facts.quantization, self.plain, self.weights, name, shape, own)

    def embedding(self, table: Table) -> Embedding:
        return Embedding(table, ranks=self.weights.ranks)

    def layer(self, index: int) -> DecoderLayer:
        prefix = f"{self.prefix}layers.{index}"
        hidden = self.facts.hidden_size
        return Layer(
            input_norm=self.norm(f"{prefix}.input_layernorm", hidden),
            attention=self.attention(index, f"{prefix}.self_attn"),
            post_norm=self.norm(f"{prefix}.post_attention_layernorm", hidden),
            mlp=self.feed_forward(index, prefix),
        )

    def feed_forward(self, index: int, prefix: str) -> FeedForward:
        """Return the part of layer ``index`` after its attention."""
        return self.mlp(f"{prefix}.mlp")

    def attention(self, index: int, prefix: str) -> Mixer:
        """Return the attention of layer ``index``, whose tensors begin with ``prefix``."""
        return self.attention_by(self.qkv(prefix), index, prefix)

    def qkv(self, prefix: str) -> Linear:
        """Return the projection to q, k and v."""
        return Linear.load(self.method, self.weights, self.qkv_parts(prefix))

    def qkv_parts(self, prefix: str) -> list[LinearPart]:
        """Return the parts of the projection to q, k and v, in this order."""
        facts, shard = self.facts, self.weights.shard(OUTPUTS)
        heads = {"q": facts.num_heads, "k": facts.num_kv_heads, "v": facts.num_kv_heads}
        return [
            LinearPart(
                f"{prefix}.{each}_proj",
                (count * facts.head_dim, facts.hidden_size),
                facts.attention_bias,
                shard,
            )
            for each, count in heads.items()
        ]

    def attention_by(self, qkv: Linear, index: int, prefix: str) -> Attention:
        """Return the attention with a projection to q, k and v."""
        facts = self.facts
        width = facts.num_heads * facts.head_dim
        return self.attention_type(
            index=index,
            group=self.groups[index],
            scores=self.scores(index),
            rope=self.rope(index),
            qkv=qkv,
            parts=qkv.split(width // self.weights.ranks.size),
            out=self.linear(
                {f"{prefix}.o_proj": facts.hidden_size},
                width,
                bias=facts.attention_output_bias,
                dim=INPUTS,
            ),
            head_dim=facts.head_dim,
            qk_norm=self.qk_norm(prefix) if facts.qk_norm else None,
        )

    def qk_norm(self, prefix: str) -> QKNorm:
        dim = self.facts.head_dim
        q, k = (self.vector(f"{prefix}.{each}_norm.weight", dim) for each in "qk")
        return QKNorm(q, k, self.facts.rms_norm_eps)

    def mlp(self, prefix: str) -> MLP:
        return self.mlp_of(prefix, self.facts.intermediate_size)

    def mlp_of(self, prefix: str, inner: int) -> MLP:
        """Return an MLP with ``inner`` values between its products."""
        facts, bias = self.facts, self.facts.mlp_bias
        return self.mlp_type(
            gate_up=Linear.load(self.method, self.weights, self.gate_up_parts(prefix, inner)),
            down=self.linear(
                {f"{prefix}.down_proj": facts.hidden_size}, inner, bias=bias, dim=INPUTS
            ),
            gate=_GATES[facts.hidden_act],
        )

    def gate_up_parts(self, prefix: str, inner: int) -> list[LinearPart]:
        """Return the parts of the gate and of what it multiplies, in this order."""
        facts, shard = self.facts, self.weights.shard(OUTPUTS)
        return [
            LinearPart(f"{prefix}.{name}_proj", (inner, facts.hidden_size), facts.mlp_bias, shard)
            for name in ("gate", "up")
        ]

    def linear(
        self, parts: dict[str, int], width: int, *, bias: bool, dim: int = OUTPUTS
    ) -> Linear:
        """Return the merged layer of ``parts``, outputs by name without suffix. Ranks cut it along
        ``dim``."""
        shard = self.weights.shard(dim)
        wanted = [LinearPart(name, (out, width), bias, shard) for name, out in parts.items()]
        return Linear.load(self.method, self.weights, wanted)

    def norm(self, prefix: str, width: int) -> RMSNorm:
        return RMSNorm(self.vector(f"{prefix}.weight", width), self.facts.rms_norm_eps)

    def vector(self, name: str, width: int) -> Tensor:
        """Return a small tensor in its own memory, so that no file stays mapped for it."""
        return self.weights.get(name, (width,)).clone()


@dataclass(frozen=True, slots=True)
class OffsetNormBuilder(DecoderBuilder):
    """Builder of a decoder whose norms multiply by 1 + weight."""

    def vector(self, name: str, width: int) -> Tensor:
        """Return 1 + weight, added in float32 and rounded once."""
        return (self.weights.get(name, (width,), dtype=torch.float32) + 1).to(self.weights.dtype)


def load_model(facts: ModelFacts, weights: Weights) -> CausalModel:
    """Load the model with its weights. Raises InvalidParameter or a LoadError."""
    check_servable(facts)
    layers = family_of(facts.architecture).layers
    if layers is None:
        return cast(CausalModel, DecoderBuilder.of(facts, weights).build())
    return cast(CausalModel, importlib.import_module(layers).load(facts, weights))
