"""Llama, Mistral, SmolLM2 and the Qwen families."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from tandem.engine.config.families.base import WINDOWS, Family, window_of, windowed
from tandem.engine.config.families.values import positive
from tandem.protocol.card import KVKind
from tandem.protocol.errors import InvalidParameter

_WINDOW = 4096
"""Window of Mistral and Qwen, and first Qwen layer with one, if config.json has no such keys."""
_WHOLE_LAYERS = 28


class Qwen2(Family):
    """Qwen2 and Qwen2.5, whose config.json does not mention the bias of q, k and v."""

    architectures = ("Qwen2ForCausalLM",)
    layer_types = WINDOWS

    def facts(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        return {
            "attention_bias": True,
            "attention_output_bias": False,
            **self.windows(config),
        }

    def windows(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the fields of windows, which use_sliding_window turns on."""
        used = bool(config.get("use_sliding_window", False))
        window = window_of(config, _WINDOW) if used else None
        kinds = self.stated_kinds(config)
        if not kinds:
            first = config.get("max_window_layers", _WHOLE_LAYERS)
            if isinstance(first, bool) or not isinstance(first, int) or first < 0:
                allowed = "the number of layers without a window"
                raise InvalidParameter("config.json: max_window_layers", first, allowed)
            count = positive(config, "num_hidden_layers")
            own = KVKind.FULL if window is None else KVKind.WINDOW
            kinds = tuple(own if i >= first else KVKind.FULL for i in range(count))
        return windowed(kinds, window)


class Qwen3(Qwen2):
    """Qwen3, whose config.json does not mention the norms; a head is 128 wide at any size."""

    architectures = ("Qwen3ForCausalLM",)
    defaults: ClassVar[Mapping[str, Any]] = {"head_dim": 128}

    def facts(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"qk_norm": True, **self.windows(config)}


class Llama(Family):
    """Llama, with biases as in config.json."""

    architectures = ("LlamaForCausalLM",)

    def facts(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        window, length = config.get("sliding_window"), positive(config, "max_position_embeddings")
        if isinstance(window, int) and 0 < window < length:
            allowed = "null: layers of Llama attend to all tokens, those of Mistral have windows"
            raise InvalidParameter("config.json: sliding_window", window, allowed)
        return {}


class Mistral(Family):
    """Mistral, with a window in all layers or in none."""

    architectures = ("MistralForCausalLM",)
    layer_types = WINDOWS

    def facts(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        window = window_of(config, _WINDOW)
        own = KVKind.FULL if window is None else KVKind.WINDOW
        if any(kind is not own for kind in self.stated_kinds(config)):
            allowed = "null: layers of Mistral are all alike, and sliding_window states their kind"
            raise InvalidParameter("config.json: layer_types", config["layer_types"], allowed)
        return windowed((own,) * positive(config, "num_hidden_layers"), window)
