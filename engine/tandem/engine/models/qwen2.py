"""Qwen2 and Qwen2.5, dense: q, k and v have a bias, o has none."""

from __future__ import annotations

from tandem.engine.config import ModelFacts
from tandem.engine.loader import Weights
from tandem.engine.models.build import DecoderBuilder
from tandem.engine.models.decoder import Decoder

ARCHITECTURES = ("Qwen2ForCausalLM",)


def load(facts: ModelFacts, weights: Weights) -> Decoder:
    """``facts`` carry the family's bias, which config.json does not mention."""
    assert facts.attention_bias, "facts of model_type qwen2 have the bias"
    return DecoderBuilder.of(facts, weights).build()
