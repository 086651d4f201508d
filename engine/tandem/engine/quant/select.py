"""Which form of weights a device takes."""

from __future__ import annotations

import torch

from tandem.engine.quant.base import LinearMethod
from tandem.engine.quant.dense import DenseMethod
from tandem.engine.quant.packed import PackedMethod


def select_method(device: torch.device, dtype: torch.dtype) -> LinearMethod:
    """Packed weights on a CPU that has oneDNN for ``dtype``, else plain ones."""
    if device.type == "cpu" and PackedMethod.available(dtype):
        return PackedMethod()
    return DenseMethod()
