"""Model families by the architecture that config.json names."""

from tandem.engine.models.base import (
    CausalModel,
    EmbeddedTokens,
    LastLayersQueued,
    StagedVectors,
    StepContext,
    TokenTypes,
)
from tandem.engine.models.registry import load_model

__all__ = [
    "CausalModel",
    "EmbeddedTokens",
    "LastLayersQueued",
    "StagedVectors",
    "StepContext",
    "TokenTypes",
    "load_model",
]
