"""Qwen2 and Qwen2.5, dense: q, k and v have a bias, o has none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tandem.engine.config.families.base import Family, used_window


class Qwen2(Family):
    """Qwen2 and Qwen2.5, whose config.json does not mention the bias of q, k and v."""

    architectures = ("Qwen2ForCausalLM",)

    def facts(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """See Family."""
        return {
            "attention_bias": True,
            "attention_output_bias": False,
            "sliding_window": used_window(config),
        }
