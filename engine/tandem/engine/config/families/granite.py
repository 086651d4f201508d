"""Granite (dense)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from tandem.engine.config.facts import Multipliers
from tandem.engine.config.families.base import Family
from tandem.engine.config.families.values import above_zero

_NAMES = ("attention_multiplier", "embedding_multiplier", "logits_scaling", "residual_multiplier")


class Granite(Family):
    """Llama with multipliers of embeddings, scores, outputs and logits."""

    architectures = ("GraniteForCausalLM",)
    saved_as: ClassVar[tuple[str, ...]] = ("ForCausalLM", "Model")
    layers = "tandem.engine.models.granite"
    keys = frozenset(_NAMES)
    defaults: ClassVar[Mapping[str, Any]] = dict.fromkeys(_NAMES, 1.0)

    def facts(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        attention, embedding, logits, residual = (above_zero(each, config[each]) for each in _NAMES)
        return {
            "attention_scale": attention,
            "multipliers": Multipliers(embedding=embedding, residual=residual, logits=1.0 / logits),
        }
