"""Weights of one rank: safetensors mapped into memory, or seeded dummies.

Call ``open_weights``, ``get`` or ``raw`` for each tensor, then ``check_all_used``. Errors are
``LoadError`` and name tensor and file.
"""

from tandem.engine.loader.errors import LoadError
from tandem.engine.loader.opening import DummyWeights, open_weights
from tandem.engine.loader.safetensors import SafetensorsWeights
from tandem.engine.loader.weights import (
    INPUTS,
    OUTPUTS,
    WHOLE,
    LinearPart,
    Shard,
    TensorSpec,
    Weights,
)

__all__ = [
    "INPUTS",
    "OUTPUTS",
    "WHOLE",
    "DummyWeights",
    "LinearPart",
    "LoadError",
    "SafetensorsWeights",
    "Shard",
    "TensorSpec",
    "Weights",
    "open_weights",
]
