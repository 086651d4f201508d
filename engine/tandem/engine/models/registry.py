"""Loads a model by its architecture."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Self, cast

import torch
from torch import Tensor

from tandem.engine.config import ModelFacts
from tandem.engine.config.families import check_servable, family_of
from tandem.engine.layers.linear import (
    Embedding,
    Linear,
    LMHead,
    RMSNorm,
)
from tandem.engine.layers.rotary import Rotary
from tandem.engine.loader import Weights
from tandem.engine.models.base import CausalModel
from tandem.engine.models.decoder import (
    MLP,
    Attention,
    Decoder,
    Layer,
)
from tandem.engine.quant import (
    LinearMethod,
    LinearPart,
    PlainMethod,
    method_of,
    select_method,
)
from tandem.kernels.rotary_kv import QKNorm

DERIVED = ("*.rotary_emb.inv_freq", "*.attn.bias", "*.masked_bias")
"""Tensors in some checkpoints that follow from config.json."""
PREFIX = "model."
NARROW = 2048
"""Hidden size up to which the residual stream is float32; see docs/performance.md."""


@dataclass(frozen=True, slots=True)
class DecoderBuilder:
    """Builder of one decoder; subclasses override attention, MLP and layers."""

    facts: ModelFacts
    weights: Weights
    method: LinearMethod
    """Method of the form that the checkpoint's layers have."""
    plain: PlainMethod
    """Method of weights that are plain in any form: the head's."""

    @classmethod
    def of(cls, facts: ModelFacts, weights: Weights) -> Self:
        """Return a builder with the form of weights that checkpoint and device have."""
        plain = select_method(weights.device, weights.dtype)
        return cls(facts, weights, method_of(facts.quantization, plain, weights.device), plain)

    @property
    def prefix(self) -> str:
        """Return the prefix of the names of all but the heads; "" if saved without a head."""
        return PREFIX if f"{PREFIX}embed_tokens.weight" in self.weights else ""

    def build(self) -> Decoder:
        """Build the model from every tensor of the checkpoint. Raises a LoadError."""
        facts, weights = self.facts, self.weights
        table_name = f"{self.prefix}embed_tokens.weight"
        table = weights.get(table_name, (facts.vocab_size, facts.hidden_size))
        layers = tuple(self.layer(i) for i in range(facts.num_layers))
        norm = self.norm(f"{self.prefix}norm", facts.hidden_size)
        head, classifier = table, None
        tied = facts.tie_word_embeddings or not facts.pooling.generates
        if facts.pooling.labels and not facts.pooling.label_tokens:
            shape = (len(facts.pooling.labels), facts.hidden_size)
            classifier = weights.get("score.weight", shape, dtype=torch.float32).clone()
        if not tied:
            head = weights.get("lm_head.weight", (facts.vocab_size, facts.hidden_size))
        if facts.pooling.label_tokens:
            rows = head[list(facts.pooling.label_tokens)].float()
            classifier = rows[:1] - rows[1:].sum(0)
        model = Decoder(
            facts=facts,
            embedding=Embedding(table),
            layers=layers,
            norm=norm,
            head=LMHead(Linear(self.plain.hold(head, None))),
            rotary=Rotary(facts, dtype=weights.dtype, device=weights.device),
            stream_dtype=torch.float32 if facts.hidden_size <= NARROW else weights.dtype,
            classifier=classifier,
        )
        copies = ("lm_head.weight",) if tied else ()
        weights.check_all_used(ignore=(*DERIVED, *copies))
        return model

    def layer(self, index: int) -> Layer:
        prefix = f"{self.prefix}layers.{index}"
        hidden = self.facts.hidden_size
        return Layer(
            input_norm=self.norm(f"{prefix}.input_layernorm", hidden),
            attention=self.attention(index, f"{prefix}.self_attn"),
            post_norm=self.norm(f"{prefix}.post_attention_layernorm", hidden),
            mlp=self.mlp(f"{prefix}.mlp"),
        )

    def attention(self, index: int, prefix: str) -> Attention:
        """Return the attention of layer ``index``, whose tensors begin with ``prefix``."""
        facts = self.facts
        hidden, dim = facts.hidden_size, facts.head_dim
        outs = {"q": facts.num_heads * dim, "k": facts.num_kv_heads * dim}
        outs["v"] = outs["k"]
        qk_norm = None
        if facts.qk_norm:
            q, k = (self.vector(f"{prefix}.{each}_norm.weight", dim) for each in "qk")
            qk_norm = QKNorm(q, k, facts.rms_norm_eps)
        qkv = self.linear(
            {f"{prefix}.{each}_proj": out for each, out in outs.items()},
            hidden,
            bias=facts.attention_bias,
        )
        return Attention(
            index=index,
            qkv=qkv,
            parts=qkv.split(outs["q"]),
            out=self.linear(
                {f"{prefix}.o_proj": hidden}, outs["q"], bias=facts.attention_output_bias
            ),
            head_dim=dim,
            qk_norm=qk_norm,
        )

    def mlp(self, prefix: str) -> MLP:
        facts = self.facts
        inner, bias = facts.intermediate_size, facts.mlp_bias
        gate_up = {f"{prefix}.gate_proj": inner, f"{prefix}.up_proj": inner}
        return MLP(
            gate_up=self.linear(gate_up, facts.hidden_size, bias=bias),
            down=self.linear({f"{prefix}.down_proj": facts.hidden_size}, inner, bias=bias),
        )

    def linear(self, parts: dict[str, int], width: int, *, bias: bool) -> Linear:
        """Return the merged layer of ``parts``, outputs by name without suffix."""
        wanted = [LinearPart(name, (out, width), bias) for name, out in parts.items()]
        return Linear.load(self.method, self.weights, wanted)

    def norm(self, prefix: str, width: int) -> RMSNorm:
        return RMSNorm(self.vector(f"{prefix}.weight", width), self.facts.rms_norm_eps)

    def vector(self, name: str, width: int) -> Tensor:
        """Return a small tensor in its own memory, so that no file stays mapped for it."""
        return self.weights.get(name, (width,)).clone()


def load_model(facts: ModelFacts, weights: Weights) -> CausalModel:
    """Load the model with its weights. Raises InvalidParameter or a LoadError."""
    check_servable(facts)
    layers = family_of(facts.architecture).layers
    if layers is None:
        return cast(CausalModel, DecoderBuilder.of(facts, weights).build())
    return cast(CausalModel, importlib.import_module(layers).load(facts, weights))
