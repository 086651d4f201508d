"""Opens the weights of a config."""

from __future__ import annotations

from pathlib import Path

import torch

from tandem.engine.config import EngineConfig
from tandem.engine.loader.dummy import DummyWeights
from tandem.engine.loader.safetensors import SafetensorsWeights
from tandem.engine.loader.weights import Weights

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def open_weights(
    config: EngineConfig, *, device: torch.device | None = None, progress: bool = True
) -> Weights:
    """Open the weights of ``config.model``, or dummies for load format ``dummy``.

    ``device`` is ``config.device`` unless a rank has its own. Raises WeightsNotFound,
    BadWeightsFile.
    """
    where = device if device is not None else torch.device(config.device)
    dtype = DTYPES[config.dtype]
    if config.model.load_format == "dummy":
        return DummyWeights(config.model.seed, dtype=dtype, device=where, progress=progress)
    folder = Path(config.model.model)
    return SafetensorsWeights(folder, dtype=dtype, device=where, progress=progress)
