"""Phi-3, and Phi-4 (14B), which has its layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from tandem.engine.config.facts import ModelFacts
from tandem.engine.config.families.base import Family, check_rotated, window_of, windowed
from tandem.engine.config.families.values import check_only, positive
from tandem.protocol.card import KVKind
from tandem.protocol.errors import InvalidParameter

_ONLY = {"full_attn_mod": (1,), "attention_bias": (False,), "mlp_bias": (False,)}


class Phi3(Family):
    """Phi-3 and Phi-4, with a window in all layers or in none."""

    architectures = ("Phi3ForCausalLM",)
    layers = "tandem.engine.models.phi"
    partial_rotary = True
    keys = frozenset(_ONLY)
    defaults: ClassVar[Mapping[str, Any]] = {"rms_norm_eps": 1e-5}

    def facts(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        check_only(config, _ONLY)
        window, count = window_of(config, None), positive(config, "num_hidden_layers")
        if window is not None and window >= positive(config, "max_position_embeddings"):
            window = None
        kind = KVKind.FULL if window is None else KVKind.WINDOW
        return windowed((kind,) * count, window)

    def check(self, facts: ModelFacts) -> None:
        super().check(facts)
        check_rotated(facts)
        if facts.rope.kind != "default":
            allowed = "default: a rotary embedding of two lengths (longrope) is not computed"
            raise InvalidParameter(
                "config.json: rope_parameters.rope_type", facts.rope.kind, allowed
            )
