"""Qwen3.5: linear attention with a state, and attention with an output gate."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from tandem.engine.config import ModelFacts
from tandem.engine.layers.linear import Linear, RMSNorm
from tandem.engine.layers.rotary import rotary_order
from tandem.engine.loader import Weights
from tandem.engine.models.base import StepContext
from tandem.engine.models.decoder import Attention, Decoder, Layer, Mixer
from tandem.engine.models.registry import OffsetNormBuilder
from tandem.kernels.gated_delta import DeltaShape, gated_delta
from tandem.kernels.rotary_kv import QKNorm
from tandem.protocol.card import KVKind


@dataclass(frozen=True, slots=True)
class GatedAttention:
    """Attention times the sigmoid of a gate. Implements Mixer."""

    attention: Attention
    gate: Linear

    @property
    def kind(self) -> KVKind:
        return self.attention.kind

    @property
    def out(self) -> Linear:
        return self.attention.out

    def __call__(self, stream: Tensor, norm: RMSNorm, step: StepContext) -> Tensor:
        attended = self.attention(stream, norm, step)
        return attended.mul_(self.gate.of_norm(stream, norm, step.rows).sigmoid_())

    def of_rows(self, stream: Tensor, norm: RMSNorm, step: StepContext, rows: Tensor) -> Tensor:
        attended = self.attention.of_rows(stream, norm, step, rows)
        stream = stream.index_select(0, rows)
        return attended.mul_(self.gate.of_norm(stream, norm, step.rows_at(rows)).sigmoid_())


@dataclass(frozen=True, slots=True)
class DeltaAttention:
    """Linear attention by the gated delta rule. Implements Mixer."""

    index: int
    state: int
    """Number of its group among those of states."""
    shape: DeltaShape
    project: Linear
    """Projection to q, k and v, the output's gate z, b of beta and a of the decay."""
    conv: Tensor
    """float32 [channels, conv_kernel]."""
    rate: Tensor
    """float32 [value heads]: -exp(A_log)."""
    bias: Tensor
    """float32 [value heads]: bias of a."""
    norm: RMSNorm
    out: Linear

    @property
    def kind(self) -> KVKind:
        return KVKind.STATE

    def __call__(self, stream: Tensor, norm: RMSNorm, step: StepContext) -> Tensor:
        """Update the states; return [tokens, value heads * value_dim]."""
        shape, states = self.shape, step.sequences.states
        assert states is not None, "a model with states has their blocks in every step"
        heads, width = shape.num_value_heads, shape.num_value_heads * shape.value_dim
        projected = self.project.of_norm(stream, norm, step.rows)
        qkv, z, b, a = projected.tensor_split(
            (shape.channels, shape.channels + width, shape.channels + width + heads), 1
        )
        found = gated_delta(
            qkv,
            self.rate * softplus(a.float() + self.bias),
            b.float().sigmoid(),
            self.conv,
            step.kv[self.index],
            states[self.state],
            step.spans,
            shape,
        )
        return self.norm(found).flatten(1).float().mul_(silu(z.float())).to(projected.dtype)

    def of_rows(self, stream: Tensor, norm: RMSNorm, step: StepContext, rows: Tensor) -> Tensor:
        return self(stream, norm, step).index_select(0, rows)


@dataclass(frozen=True, slots=True)
class Qwen3_5Builder(OffsetNormBuilder):
    """Builder of one model."""

    def layer(self, index: int) -> Layer:
        prefix, hidden = f"{self.prefix}layers.{index}", self.facts.hidden_size
        linear = self.facts.kinds[index] is KVKind.STATE
        return Layer(
            input_norm=self.norm(f"{prefix}.input_layernorm", hidden),
            attention=self.delta(index, f"{prefix}.linear_attn")
            if linear
            else self.attention(index, f"{prefix}.self_attn"),
            post_norm=self.norm(f"{prefix}.post_attention_layernorm", hidden),
            mlp=self.mlp(f"{prefix}.mlp"),
        )

    def attention(self, index: int, prefix: str) -> Mixer:
        """Return the attention; q_proj has a head's q, then its gate.

        Numbers of q and k are in the order of ``rotary_order``.
        """
        facts = self.facts
        hidden, dim, order = facts.hidden_size, facts.head_dim, rotary_order(facts)
        both = self.rows(f"{prefix}.q_proj", 2 * facts.num_heads).view(-1, 2, dim, hidden)
        q, gate = both[:, 0, order], both[:, 1]
        k, v = (self.rows(f"{prefix}.{each}_proj", facts.num_kv_heads) for each in "kv")
        k = k.view(-1, dim, hidden)[:, order]
        qkv = torch.cat([each.reshape(-1, hidden) for each in (q, k, v)])
        attention = self.attention_by(Linear(self.plain.hold(qkv, None)), index, prefix)
        return GatedAttention(attention, Linear(self.plain.hold(gate.reshape(-1, hidden), None)))

    def rows(self, prefix: str, heads: int) -> Tensor:
        """Return the weight [heads * head_dim, hidden] of a projection."""
        shape = (heads * self.facts.head_dim, self.facts.hidden_size)
        return self.weights.get(f"{prefix}.weight", shape)

    def qk_norm(self, prefix: str) -> QKNorm:
        """Return the norms of q and k in the order of ``rotary_order``."""
        norm = OffsetNormBuilder.qk_norm(self, prefix)
        order = rotary_order(self.facts).to(norm.q_weight.device)
        return QKNorm(norm.q_weight[order], norm.k_weight[order], norm.eps)

    def delta(self, index: int, prefix: str) -> DeltaAttention:
        facts, linear = self.facts, self.facts.linear
        assert linear is not None, "a model with states has the facts of their layers"
        shape = DeltaShape(
            linear.num_key_heads,
            linear.key_head_dim,
            linear.num_value_heads,
            linear.value_head_dim,
            linear.conv_kernel,
        )
        heads, width = shape.num_value_heads, shape.num_value_heads * shape.value_dim
        outs = {"qkv": shape.channels, "z": width, "b": heads, "a": heads}
        parts = {f"{prefix}.in_proj_{name}": out for name, out in outs.items()}
        conv = self.exact(f"{prefix}.conv1d.weight", shape.channels, 1, shape.conv_kernel)
        norm = self.weights.get(f"{prefix}.norm.weight", (shape.value_dim,)).clone()
        return DeltaAttention(
            index=index,
            state=self.groups[index] - min(self.groups[i] for i in self.layers_with_states),
            shape=shape,
            project=self.linear(parts, facts.hidden_size, bias=False),
            conv=conv.squeeze(1),
            rate=-self.exact(f"{prefix}.A_log", heads).exp(),
            bias=self.exact(f"{prefix}.dt_bias", heads),
            norm=RMSNorm(norm, facts.rms_norm_eps),
            out=self.linear({f"{prefix}.out_proj": facts.hidden_size}, width, bias=False),
        )

    @property
    def layers_with_states(self) -> list[int]:
        return [i for i, kind in enumerate(self.facts.kinds) if kind is KVKind.STATE]

    def exact(self, name: str, *shape: int) -> Tensor:
        """Return a small tensor in float32, in its own memory."""
        return self.weights.get(name, shape, dtype=torch.float32).clone()


def load(facts: ModelFacts, weights: Weights) -> Decoder:
    """Load the model with its weights. Raises a LoadError."""
    return Qwen3_5Builder.of(facts, weights).build()
