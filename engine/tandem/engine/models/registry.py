"""From an architecture's name to the module that loads it, imported when it is asked for."""

from __future__ import annotations

import importlib
from typing import cast

from tandem.engine.config import ModelFacts
from tandem.engine.loader import Weights
from tandem.engine.models.base import CausalModel
from tandem.protocol.errors import InvalidParameter

FAMILIES = {
    "LlamaForCausalLM": "tandem.engine.models.llama",
    "MistralForCausalLM": "tandem.engine.models.llama",
    "Qwen2ForCausalLM": "tandem.engine.models.qwen2",
    "Qwen3ForCausalLM": "tandem.engine.models.qwen3",
}
"""Architecture, as config.json names it, to the module with its ``load``."""

ACTIVATIONS = ("silu", "swish")


def check_servable(facts: ModelFacts) -> None:
    """Raise InvalidParameter, naming the field, for a model that no family here computes."""
    if facts.architecture not in FAMILIES:
        raise InvalidParameter(
            "config.json: architectures", facts.architecture, f"one of {', '.join(FAMILIES)}"
        )
    if facts.hidden_act not in ACTIVATIONS:
        raise InvalidParameter(
            "config.json: hidden_act", facts.hidden_act, f"one of {', '.join(ACTIVATIONS)}"
        )


def load_model(facts: ModelFacts, weights: Weights) -> CausalModel:
    """The model with its weights. Raises InvalidParameter or a LoadError."""
    check_servable(facts)
    module = importlib.import_module(FAMILIES[facts.architecture])
    return cast(CausalModel, module.load(facts, weights))
