"""Decoder of which some layers have a mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from tandem.engine.config import ModelFacts
from tandem.engine.config.experts import ExpertFacts
from tandem.engine.layers.linear import Linear, RMSNorm
from tandem.engine.loader import Weights
from tandem.engine.models.decoder import MLP, Decoder, FeedForward
from tandem.engine.models.registry import DecoderBuilder
from tandem.engine.quant import LinearPart, Rows
from tandem.engine.quant.experts import ExpertForms, ExpertPart, Experts
from tandem.engine.ranks import Ranks
from tandem.kernels.moe import RoutingRule, Scoring, route


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """Expert of all tokens, maybe times the sigmoid of a product."""

    mlp: MLP
    gate: Linear | None

    def __call__(self, stream: Tensor, norm: RMSNorm, normed: Tensor, rows: Rows) -> Tensor:
        """Return float32 [tokens, hidden]."""
        found = self.mlp.down.in_float32(self.mlp.inner(stream, norm, rows), rows)
        return found if self.gate is None else found.mul_(self.gate.in_float32(normed).sigmoid_())


@dataclass(frozen=True, slots=True)
class MixtureOfExperts:
    """Router, experts, and maybe a shared expert. Implements FeedForward."""

    router: Linear
    rule: RoutingRule
    correction: Tensor | None
    """float32 [experts], added to the scores that choose."""
    experts: Experts
    shared: SharedExpert | None
    ranks: Ranks
    """Ranks that each have a part of every expert; all have the router."""

    def __call__(self, stream: Tensor, norm: RMSNorm, rows: Rows) -> Tensor:
        normed = norm(stream)
        routes = route(self.router.in_float32(normed), self.rule, self.correction)
        found = self.ranks.sum(self.experts(normed, routes))
        if self.shared is not None:
            found = found.add_(self.shared(stream, norm, normed, rows))
        return stream.add_(found)


@dataclass(frozen=True, slots=True)
class MoEBuilder(DecoderBuilder):
    """Builder of one model."""

    forms: ExpertForms = field(init=False)
    """Methods of the forms that the experts have."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "forms", ExpertForms(self.facts.quantization, self.plain))

    def feed_forward(self, index: int, prefix: str) -> FeedForward:
        experts = self.facts.experts
        assert experts is not None, "a model of this module has the facts of its experts"
        if index not in experts.layers:
            return self.mlp(f"{prefix}.mlp")
        return self.mixture(experts, f"{prefix}.{experts.names.block}")

    def mixture(self, experts: ExpertFacts, prefix: str) -> MixtureOfExperts:
        """Return the experts whose tensors begin with ``prefix``."""
        facts, weights, router = self.facts, self.weights, f"{prefix}.{experts.names.router}"
        shape, correction = (experts.num_experts, facts.hidden_size), None
        if experts.correction_bias:
            name = f"{router}.e_score_correction_bias"
            correction = weights.get(name, shape[:1], dtype=torch.float32).clone()
        part = LinearPart(router, shape, experts.router_bias)
        return MixtureOfExperts(
            router=Linear.load(self.plain, weights, [part]),
            rule=rule_of(experts),
            correction=correction,
            experts=self.forms.load(
                weights, ExpertPart(f"{prefix}.experts", experts, facts.hidden_size)
            ),
            shared=self.shared(experts, prefix),
            ranks=weights.ranks,
        )

    def shared(self, experts: ExpertFacts, prefix: str) -> SharedExpert | None:
        """Return the expert of all tokens; None if the layer has none."""
        if experts.shared_width is None:
            return None
        name, gate = f"{prefix}.{experts.names.shared}", None
        if experts.shared_gate:
            part = LinearPart(f"{name}_gate", (1, self.facts.hidden_size))
            gate = Linear.load(self.plain, self.weights, [part])
        return SharedExpert(self.mlp_of(name, experts.shared_width), gate)


def rule_of(experts: ExpertFacts) -> RoutingRule:
    """Return how the experts of a token are chosen."""
    return RoutingRule(
        num_chosen=experts.experts_per_token,
        scoring=Scoring(experts.scoring.value),
        normalized=experts.norm_topk,
        num_groups=experts.num_groups,
        chosen_groups=experts.chosen_groups,
        scale=experts.routed_scale,
    )


def load(facts: ModelFacts, weights: Weights) -> Decoder:
    """Load the model with its weights. Raises a LoadError."""
    return MoEBuilder.of(facts, weights).build()
