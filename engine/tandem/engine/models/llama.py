"""Llama and those that share its code: SmolLM2, Mistral.

Mistral's sliding window: the engine's config admits no sequence longer than the window, within
which the window and full attention are the same.
"""

from __future__ import annotations

from tandem.engine.config import ModelFacts
from tandem.engine.loader import Weights
from tandem.engine.models.build import DecoderBuilder
from tandem.engine.models.decoder import Decoder

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")


def load(facts: ModelFacts, weights: Weights) -> Decoder:
    """Biases are as config.json says; most checkpoints have none."""
    return DecoderBuilder.of(facts, weights).build()
