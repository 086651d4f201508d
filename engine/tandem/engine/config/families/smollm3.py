"""SmolLM3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from tandem.engine.config.families.base import WINDOWS, Family, window_of, windowed
from tandem.engine.config.families.values import positive
from tandem.protocol.card import KVKind
from tandem.protocol.errors import InvalidParameter

_ROTATED, _INTERVAL = "no_rope_layers", "no_rope_layer_interval"


class SmolLM3(Family):
    """Llama without rotation in every fourth layer, which may have a window."""

    architectures = ("SmolLM3ForCausalLM",)
    layer_types = WINDOWS
    keys = frozenset({_ROTATED, _INTERVAL})
    defaults: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 4,
        "rope_theta": 2_000_000.0,
        "tie_word_embeddings": True,
        _INTERVAL: 4,
    }

    def facts(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        rotated = _rotated(config)
        window = window_of(config, None) if config.get("use_sliding_window") else None
        own = KVKind.FULL if window is None else KVKind.WINDOW
        by_rotation = tuple(KVKind.FULL if each else own for each in rotated)
        return {
            "unrotated_layers": tuple(i for i, each in enumerate(rotated) if not each),
            **windowed(self.stated_kinds(config) or by_rotation, window),
        }


def _rotated(config: Mapping[str, Any]) -> list[int]:
    """Return 1 for each layer with a rotary embedding, 0 for others: so does no_rope_layers."""
    count, stated = positive(config, "num_hidden_layers"), config.get(_ROTATED)
    if stated is None:
        every = positive(config, _INTERVAL)
        return [int((i + 1) % every != 0) for i in range(count)]
    if not isinstance(stated, list) or len(stated) < count or any(x not in (0, 1) for x in stated):
        allowed = f"a list of 1 (rotated) or 0 for each of the {count} layers"
        raise InvalidParameter(f"config.json: {_ROTATED}", stated, allowed)
    return stated[:count]
