"""Load the model of an architecture's name; the family names the module of its layers."""

from __future__ import annotations

import importlib
from typing import cast

from tandem.engine.config import ModelFacts
from tandem.engine.config.families import check_servable, family_of
from tandem.engine.loader import Weights
from tandem.engine.models.base import CausalModel
from tandem.engine.models.build import DecoderBuilder


def load_model(facts: ModelFacts, weights: Weights) -> CausalModel:
    """Load the model with its weights. Raises InvalidParameter or a LoadError."""
    check_servable(facts)
    layers = family_of(facts.architecture).layers
    if layers is None:
        return cast(CausalModel, DecoderBuilder.of(facts, weights).build())
    return cast(CausalModel, importlib.import_module(layers).load(facts, weights))
