"""OLMo 2 and OLMo 3."""

from __future__ import annotations

from collections.abc import Mapping
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
from tandem.engine.config.families.values import positive
from tandem.protocol.card import KVKind

_THETAS = {FULL: ("rope_theta", 500_000.0), WINDOW: ("rope_theta", 500_000.0)}
_EVERY, _WINDOW = 4, 4096
"""Layers to the next one without a window, and its keys, if config.json does not state them."""


class Olmo2(Family):
    """OLMo 2, whose norms follow attention and MLP."""

    architectures = ("Olmo2ForCausalLM",)
    layers = "tandem.engine.models.olmo"
    defaults: ClassVar[Mapping[str, Any]] = {"rms_norm_eps": 1e-5}


class Olmo3(Olmo2):
    """OLMo 2 with windows; layers with full attention have the scaled rotary embedding."""

    architectures = ("Olmo3ForCausalLM",)
    layer_types = WINDOWS

    def rope(self, config: Mapping[str, Any]) -> RopeFacts:
        return ropes_by_type(config, _THETAS)[FULL]

    def facts(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        count = positive(config, "num_hidden_layers")
        by_turns = tuple(KVKind.WINDOW if (i + 1) % _EVERY else KVKind.FULL for i in range(count))
        return {
            "local_rope": ropes_by_type(config, _THETAS)[WINDOW],
            **windowed(self.stated_kinds(config) or by_turns, window_of(config, _WINDOW)),
        }

    def check(self, facts: ModelFacts) -> None:
        super().check(facts)
        check_local_rope(facts)
