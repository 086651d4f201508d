"""Prepared folder → tensors of one rank: safetensors, mapped into memory, or seeded dummies.

Public: ``open_weights(config) -> Weights``; a model calls ``weights.get(name, shape)`` for every
tensor that it needs, merges what it merges, and ends with ``weights.check_all_used()``. Errors are
of the tree of ``LoadError`` and name the tensor and the file. Called by tandem.engine.worker and
models.
"""

from tandem.engine.loader.dummy import DummyWeights
from tandem.engine.loader.errors import (
    BadWeightsFile,
    LoadError,
    MissingTensor,
    UnexpectedTensors,
    UnsupportedTensor,
    WeightsNotFound,
    WrongShape,
)
from tandem.engine.loader.opening import open_weights
from tandem.engine.loader.safetensors import SafetensorsWeights
from tandem.engine.loader.weights import Weights

__all__ = [
    "BadWeightsFile",
    "DummyWeights",
    "LoadError",
    "MissingTensor",
    "SafetensorsWeights",
    "UnexpectedTensors",
    "UnsupportedTensor",
    "Weights",
    "WeightsNotFound",
    "WrongShape",
    "open_weights",
]
