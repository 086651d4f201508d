"""Prepared folder → tensors of one rank: safetensors, mapped into memory, or seeded dummies.

Public: ``open_weights(config) -> Weights``. A model requests every tensor that it needs by name,
shape and its rank's part (``get`` casts floats to the engine's type, ``raw`` returns codes uncast).
It merges tensors itself, and ends with ``weights.check_all_used()``. Errors are of the tree of
``LoadError`` and name the tensor and the file. Called by tandem.engine.worker, models and quant.
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
from tandem.engine.loader.weights import INPUTS, OUTPUTS, WHOLE, Shard, TensorSpec, Weights

__all__ = [
    "INPUTS",
    "OUTPUTS",
    "WHOLE",
    "BadWeightsFile",
    "DummyWeights",
    "LoadError",
    "MissingTensor",
    "SafetensorsWeights",
    "Shard",
    "TensorSpec",
    "UnexpectedTensors",
    "UnsupportedTensor",
    "Weights",
    "WeightsNotFound",
    "WrongShape",
    "open_weights",
]
