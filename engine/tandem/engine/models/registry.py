"""From an architecture's name to the module that loads it, imported when it is asked for."""

from __future__ import annotations

import importlib
from typing import cast

from tandem.engine.config import ModelFacts
from tandem.engine.config.families import FAMILIES, check_servable
from tandem.engine.loader import Weights
from tandem.engine.models.base import CausalModel


def load_model(facts: ModelFacts, weights: Weights) -> CausalModel:
    """The model with its weights. Raises InvalidParameter or a LoadError."""
    check_servable(facts)
    module = importlib.import_module(FAMILIES[facts.architecture])
    return cast(CausalModel, module.load(facts, weights))
