"""Mixtral, a Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from tandem.engine.config.experts import ExpertFacts, ExpertNames, Scoring
from tandem.engine.config.families.experts import COUNTS, counts_of
from tandem.engine.config.families.llama import Mistral
from tandem.engine.config.families.values import positive

_NAMES = ExpertNames(block="block_sparse_moe", gate="w1", up="w3", down="w2")


class Mixtral(Mistral):
    """Mixtral; without sliding_window its layers attend to all tokens, unlike Mistral's."""

    architectures = ("MixtralForCausalLM",)
    layers = "tandem.engine.models.moe"
    keys = COUNTS
    defaults: ClassVar[Mapping[str, Any]] = {"num_key_value_heads": 8, "rope_theta": 1_000_000.0}

    def facts(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        num_experts, chosen = counts_of(config)
        experts = ExpertFacts(
            num_experts=num_experts,
            experts_per_token=chosen,
            width=positive(config, "intermediate_size"),
            layers=tuple(range(positive(config, "num_hidden_layers"))),
            scoring=Scoring.SOFTMAX,
            norm_topk=True,
            names=_NAMES,
        )
        return {**Mistral.facts(self, {"sliding_window": None, **config}), "experts": experts}
