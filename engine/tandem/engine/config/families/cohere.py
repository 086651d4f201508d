"""Command R7B and Command A of Cohere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from tandem.engine.config.facts import Multipliers
from tandem.engine.config.families.base import WINDOWS, Family, window_of, windowed
from tandem.engine.config.families.values import above_zero, check_only, number, positive
from tandem.protocol.card import KVKind

_PATTERN = "sliding_window_pattern"
_SAME = ("layer_switch", "_sliding_window_pattern")
_SHARED = "use_embedding_sharing"
_ONLY = {
    "order_of_interleaved_layers": ("local_attn_first",),
    "position_embedding_type": ("rope_gptj",),
    "rotary_pct": (1,),
    "use_gated_activation": (True,),
    "use_parallel_block": (True,),
}
"""Keys that transformers does not read, with the values that its layers have."""
_WINDOW = 4096


class Cohere2(Family):
    """Decoder with a window and a rotary embedding in all layers but every fourth, which has
    neither."""

    architectures = ("Cohere2ForCausalLM",)
    saved_as: ClassVar[tuple[str, ...]] = ("ForCausalLM", "Model")
    layers = "tandem.engine.models.cohere"
    layer_types = WINDOWS
    keys = frozenset({"logit_scale", _PATTERN, _SHARED, *_SAME, *_ONLY})
    defaults: ClassVar[Mapping[str, Any]] = {
        "layer_norm_eps": 1e-5,
        "logit_scale": 0.0625,
        "tie_word_embeddings": True,
        _PATTERN: 4,
    }

    def facts(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        check_only(config, {**_ONLY, _SHARED: (config["tie_word_embeddings"],)})
        every, count = positive(config, _PATTERN), positive(config, "num_hidden_layers")
        by_turns = tuple(KVKind.WINDOW if (i + 1) % every else KVKind.FULL for i in range(count))
        kinds = self.stated_kinds(config)
        if not kinds:
            check_only(config, dict.fromkeys(_SAME, (every,)))
            kinds = by_turns
        return {
            "rms_norm_eps": number("layer_norm_eps", config["layer_norm_eps"]),
            "multipliers": Multipliers(logits=above_zero("logit_scale", config["logit_scale"])),
            "unrotated_layers": tuple(i for i, kind in enumerate(kinds) if kind is KVKind.FULL),
            **windowed(kinds, window_of(config, _WINDOW)),
        }
