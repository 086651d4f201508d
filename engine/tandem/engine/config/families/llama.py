"""Llama, Mistral, SmolLM2 and the Qwen families."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from tandem.engine.config.families.base import Family, used_window


class Qwen2(Family):
    """Qwen2 and Qwen2.5, whose config.json does not mention the bias of q, k and v."""

    architectures = ("Qwen2ForCausalLM",)

    def facts(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        return {
            "attention_bias": True,
            "attention_output_bias": False,
            "sliding_window": used_window(config),
        }


class Qwen3(Family):
    """Qwen3, whose config.json does not mention the norms; a head is 128 wide at any size."""

    architectures = ("Qwen3ForCausalLM",)
    defaults: ClassVar[Mapping[str, Any]] = {"head_dim": 128}

    def facts(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"qk_norm": True, "sliding_window": used_window(config)}


class Llama(Family):
    """Llama and Mistral, with biases as in config.json.

    A sliding window needs no code: no sequence may be longer than it.
    """

    architectures = ("LlamaForCausalLM", "MistralForCausalLM")
