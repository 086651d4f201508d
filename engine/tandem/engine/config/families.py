"""Which models can be computed here, by what their config.json says: asked before torch is there.

The image that fetches models holds no torch; the model's Job asks this of what it fetched.
"""

from __future__ import annotations

from tandem.engine.config.facts import ModelFacts
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
