"""gpt-oss: a mixture of experts, windows in every other layer, and sinks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from tandem.engine.config.experts import ExpertActivation, ExpertFacts, ExpertNames, Scoring
from tandem.engine.config.families.base import WINDOWS, Family, window_of, windowed
from tandem.engine.config.families.experts import COUNTS, counts_of
from tandem.engine.config.families.values import positive
from tandem.protocol.card import KVKind
from tandem.protocol.errors import InvalidParameter

_WINDOW = 128
_ONLY: Mapping[str, float] = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}
"""Values of keys that the activation has."""
_OTHER_PER_TOKEN = "experts_per_token"


class GptOss(Family):
    """gpt-oss."""

    architectures = ("GptOssForCausalLM",)
    layers = "tandem.engine.models.moe"
    layer_types = WINDOWS
    keys = COUNTS | frozenset({*_ONLY, _OTHER_PER_TOKEN})
    defaults: ClassVar[Mapping[str, Any]] = {
        "attention_bias": True,
        "head_dim": 64,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150_000.0,
    }

    def facts(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        for name, only in {**_ONLY, _OTHER_PER_TOKEN: config.get("num_experts_per_tok")}.items():
            if config.get(name) not in (None, only):
                raise InvalidParameter(f"config.json: {name}", config[name], str(only))
        count = positive(config, "num_hidden_layers")
        by_turns = tuple(KVKind.FULL if i % 2 else KVKind.WINDOW for i in range(count))
        num_experts, chosen = counts_of(config)
        experts = ExpertFacts(
            num_experts=num_experts,
            experts_per_token=chosen,
            width=positive(config, "intermediate_size"),
            layers=tuple(range(count)),
            scoring=Scoring.SOFTMAX_OF_CHOSEN,
            router_bias=True,
            expert_bias=True,
            activation=ExpertActivation.CLAMPED,
            names=ExpertNames(router="router", stacked=True),
        )
        return {
            "attention_sinks": True,
            "experts": experts,
            **windowed(self.stated_kinds(config) or by_turns, window_of(config, _WINDOW)),
        }
