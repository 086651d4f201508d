"""Qwen3.5, the decoder of texts: layers of a gated delta rule between layers of attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from tandem.engine.config.facts import LinearAttentionFacts, ModelFacts
from tandem.engine.config.families.base import FULL, Family, check_rotated
from tandem.engine.config.families.values import check_only, positive
from tandem.protocol.card import KVKind
from tandem.protocol.errors import InvalidParameter

_EVERY = "full_attention_interval"
_ONLY: Mapping[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "attn_output_gate": (True,),
    "mamba_ssm_dtype": ("float32",),
}
"""Values of keys that the layers compute."""


class Qwen3_5(Family):
    """Qwen3.5 (dense): every fourth layer has attention, with a gate; others keep a state."""

    architectures = ("Qwen3_5ForCausalLM",)
    saved_as: ClassVar[tuple[str, ...]] = (
        "ForCausalLM",
        "TextForSequenceClassification",
        "TextModel",
    )
    layers = "tandem.engine.models.qwen3_5"
    layer_types: ClassVar[Mapping[str, KVKind]] = {
        FULL: KVKind.FULL,
        "linear_attention": KVKind.STATE,
    }
    partial_rotary = True
    keys = frozenset(
        {"linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim", _EVERY}
        | {"linear_num_key_heads", "linear_num_value_heads", *_ONLY}
    )
    defaults: ClassVar[Mapping[str, Any]] = {
        "head_dim": 256,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "num_key_value_heads": 4,
        "partial_rotary_factor": 0.25,
        _EVERY: 4,
    }

    def facts(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        check_only(config, _ONLY)
        every, count = positive(config, _EVERY), positive(config, "num_hidden_layers")
        by_interval = tuple(KVKind.STATE if (i + 1) % every else KVKind.FULL for i in range(count))
        return {
            "qk_norm": True,
            "layer_kinds": self.stated_kinds(config) or by_interval,
            "linear": _linear(config),
        }

    def check(self, facts: ModelFacts) -> None:
        super().check(facts)
        if KVKind.FULL not in facts.kinds:
            allowed = "at least one layer of full_attention"
            raise InvalidParameter("config.json: layer_types", "linear_attention", allowed)
        check_rotated(facts)
        if facts.quantization is not None:
            allowed = "none: the weights of these layers must be plain"
            raise InvalidParameter("config.json: quantization_config", "an object", allowed)


def _linear(config: Mapping[str, Any]) -> LinearAttentionFacts:
    facts = LinearAttentionFacts(
        num_key_heads=positive(config, "linear_num_key_heads"),
        key_head_dim=positive(config, "linear_key_head_dim"),
        num_value_heads=positive(config, "linear_num_value_heads"),
        value_head_dim=positive(config, "linear_value_head_dim"),
        conv_kernel=positive(config, "linear_conv_kernel_dim"),
    )
    if facts.num_value_heads % facts.num_key_heads:
        allowed = f"a multiple of the {facts.num_key_heads} key heads"
        name = "config.json: linear_num_value_heads"
        raise InvalidParameter(name, facts.num_value_heads, allowed)
    return facts
