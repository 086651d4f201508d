"""GLM-4 (dense): GlmForCausalLM of 2024, Glm4ForCausalLM of 2025."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from tandem.engine.config.facts import ModelFacts
from tandem.engine.config.families.base import Family, check_rotated


class Glm(Family):
    """GLM-4 with norms before attention and MLP."""

    architectures = ("GlmForCausalLM",)
    layers = "tandem.engine.models.glm"
    partial_rotary = True
    defaults: ClassVar[Mapping[str, Any]] = {
        "attention_bias": True,
        "head_dim": 128,
        "num_key_value_heads": 2,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1.5625e-7,
    }

    def facts(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"attention_output_bias": False, "mlp_bias": False}

    def check(self, facts: ModelFacts) -> None:
        super().check(facts)
        check_rotated(facts)


class Glm4(Glm):
    """GLM-4 with norms before and after attention and MLP."""

    architectures = ("Glm4ForCausalLM",)
