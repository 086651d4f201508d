"""Loads a model by its architecture."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from tandem.engine.config import ModelFacts
from tandem.engine.config.families import check_servable, family_of
from tandem.engine.config.layout import layer_groups
from tandem.engine.layers.linear import (
    Embedding,
    Linear,
    LMHead,
    RMSNorm,
)
from tandem.engine.layers.rotary import Rotary
from tandem.engine.loader import INPUTS, OUTPUTS, Weights
from tandem.engine.models.base import CausalModel
from tandem.engine.models.decoder import (
    MLP,
    Attention,
    Decoder,
    DecoderLayer,
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
from tandem.kernels.activation import Gate
from tandem.kernels.attention.batch import Scores
from tandem.kernels.rotary_kv import QKNorm
from tandem.protocol.card import KVKind

DERIVED = ("*.rotary_emb.inv_freq", "*.attn.bias", "*.masked_bias")
"""Tensors in some checkpoints that follow from config.json."""
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
            shape = (facts.vocab_size, facts.hidden_size)
            whole = head if weights.ranks.size == 1 else weights.get(head_name, shape)
            rows = whole[list(facts.pooling.label_tokens)].float()
            classifier = rows[:1] - rows[1:].sum(0)
        model = Decoder(
            facts=facts,
            embedding=self.embedding(table),
            layers=layers,
            norm=norm,
            head=LMHead(Linear(self.plain.hold(head, None)), facts.vocab_size, ranks=weights.ranks),
            rotaries=self.rotaries(),
            stream_dtype=torch.float32 if facts.hidden_size <= NARROW else weights.dtype,
            classifier=classifier,
        )
        copies = ("lm_head.weight",) if tied else ()
        weights.check_all_used(ignore=(*DERIVED, *copies))
        return model

    def rotaries(self) -> tuple[Rotary, ...]:
        """Return the rotary embeddings: that of the model, then that of its windows if it has
        one."""
        facts = [self.facts]
        if self.facts.local_rope is not None:
            facts.append(replace(self.facts, rope=self.facts.local_rope))
        dtype, device = self.weights.dtype, self.weights.device
        return tuple(Rotary(each, dtype=dtype, device=device) for each in facts)

    def scores(self, index: int) -> Scores:
        """Return how layer ``index`` scores its keys."""
        facts = self.facts
        window = facts.sliding_window if facts.kinds[index] is KVKind.WINDOW else None
        scale = facts.attention_scale
        return Scores(facts.head_dim**-0.5 if scale is None else scale, window)

    def vocabulary(self, name: str) -> Tensor:
        """Return this rank's rows of a tensor [vocabulary, hidden]; zeros pad the last rank's."""
        shape = (self.facts.vocab_size, self.facts.hidden_size)
        found = self.weights.get(name, shape, self.weights.shard(OUTPUTS, uneven=True))
        missing = -(-shape[0] // self.weights.ranks.size) - len(found)
        return pad(found, (0, 0, 0, missing)) if missing else found

    def embedding(self, table: Tensor) -> Embedding:
        return Embedding(table, ranks=self.weights.ranks)

    def layer(self, index: int) -> DecoderLayer:
        prefix = f"{self.prefix}layers.{index}"
        hidden = self.facts.hidden_size
        return Layer(
            input_norm=self.norm(f"{prefix}.input_layernorm", hidden),
            attention=self.attention(index, f"{prefix}.self_attn"),
            post_norm=self.norm(f"{prefix}.post_attention_layernorm", hidden),
            mlp=self.mlp(f"{prefix}.mlp"),
        )

    def attention(self, index: int, prefix: str) -> Mixer:
        """Return the attention of layer ``index``, whose tensors begin with ``prefix``."""
        facts = self.facts
        outs = {"q": facts.num_heads * facts.head_dim, "k": facts.num_kv_heads * facts.head_dim}
        outs["v"] = outs["k"]
        qkv = self.linear(
            {f"{prefix}.{each}_proj": out for each, out in outs.items()},
            facts.hidden_size,
            bias=facts.attention_bias,
        )
        return self.attention_by(qkv, index, prefix)

    def attention_by(self, qkv: Linear, index: int, prefix: str) -> Attention:
        """Return the attention with a projection to q, k and v."""
        facts = self.facts
        width = facts.num_heads * facts.head_dim
        local = facts.local_rope is not None and facts.kinds[index] is KVKind.WINDOW
        return Attention(
            index=index,
            group=self.groups[index],
            scores=self.scores(index),
            rope=int(local),
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
        facts = self.facts
        inner, bias = facts.intermediate_size, facts.mlp_bias
        gate_up = {f"{prefix}.gate_proj": inner, f"{prefix}.up_proj": inner}
        return MLP(
            gate_up=self.linear(gate_up, facts.hidden_size, bias=bias),
            down=self.linear(
                {f"{prefix}.down_proj": facts.hidden_size}, inner, bias=bias, dim=INPUTS
            ),
            gate=_GATES[facts.hidden_act],
        )

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
