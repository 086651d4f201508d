"""Gemma 3, the decoder of texts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from tandem.engine.config.facts import ModelFacts, RopeFacts
from tandem.engine.config.families.base import (
    FULL,
    WINDOW,
    WINDOWS,
    Family,
    check_local_rope,
    window_of,
    windowed,
)
from tandem.engine.config.families.rope import ropes_by_type
from tandem.engine.config.families.values import above_zero, positive
from tandem.protocol.card import KVKind
from tandem.protocol.errors import InvalidParameter

_THETAS = {FULL: ("rope_theta", 1_000_000.0), WINDOW: ("rope_local_base_freq", 10_000.0)}
_PATTERN, _OTHER_PATTERN = "sliding_window_pattern", "_sliding_window_pattern"
_WINDOW = 4096


class Gemma3(Family):
    """Gemma 3: windows in all layers but every sixth, with a rotary embedding for each kind."""

    architectures = ("Gemma3ForCausalLM",)
    saved_as: ClassVar[tuple[str, ...]] = (
        "ForCausalLM",
        "TextForSequenceClassification",
        "TextModel",
    )
    activations = ("gelu_pytorch_tanh",)
    layers = "tandem.engine.models.gemma"
    layer_types = WINDOWS
    keys = frozenset(
        {"hidden_activation", "query_pre_attn_scalar", "rope_local_base_freq", _PATTERN}
        | {_OTHER_PATTERN}
    )
    defaults: ClassVar[Mapping[str, Any]] = {
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
        "tie_word_embeddings": True,
        _PATTERN: 6,
    }

    def rope(self, config: Mapping[str, Any]) -> RopeFacts:
        return replace(ropes_by_type(config, _THETAS)[FULL], stated_scaled=True)

    def facts(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        window = window_of(config, _WINDOW)
        scalar = config["query_pre_attn_scalar"]
        return {
            "qk_norm": True,
            "hidden_act": self._activation(config),
            "local_rope": ropes_by_type(config, _THETAS)[WINDOW],
            "attention_scale": above_zero("query_pre_attn_scalar", scalar) ** -0.5,
            **windowed(self.stated_kinds(config) or self._by_pattern(config), window),
        }

    def _activation(self, config: Mapping[str, Any]) -> str:
        for name in ("hidden_activation", "hidden_act"):
            if config.get(name) not in (None, *self.activations):
                allowed = ", ".join(self.activations)
                raise InvalidParameter(f"config.json: {name}", config[name], allowed)
        return str(config["hidden_activation"])

    def _by_pattern(self, config: Mapping[str, Any]) -> tuple[KVKind, ...]:
        """Return the kinds of a config.json without layer_types. transformers then reads the first
        name of the pattern only."""
        every, count = positive(config, _PATTERN), positive(config, "num_hidden_layers")
        other = config.get(_OTHER_PATTERN)
        if other not in (None, every):
            raise InvalidParameter(
                f"config.json: {_OTHER_PATTERN}", other, f"{every}, or layer_types"
            )
        return tuple(KVKind.WINDOW if (i + 1) % every else KVKind.FULL for i in range(count))

    def check(self, facts: ModelFacts) -> None:
        super().check(facts)
        check_local_rope(facts)
