"""Qwen3, dense: heads of a size of their own, each normed before the rotation."""

from __future__ import annotations

from tandem.engine.config import ModelFacts
from tandem.engine.loader import Weights
from tandem.engine.models.build import DecoderBuilder
from tandem.engine.models.decoder import Decoder

ARCHITECTURES = ("Qwen3ForCausalLM",)


def load(facts: ModelFacts, weights: Weights) -> Decoder:
    """``facts`` carry the family's norms of q and k."""
    assert facts.qk_norm, "facts of model_type qwen3 have the norms"
    return DecoderBuilder.of(facts, weights).build()
