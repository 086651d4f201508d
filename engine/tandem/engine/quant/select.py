"""Choice of the form of weights by device and checkpoint."""

from __future__ import annotations

import torch

from tandem.engine.config.facts import QuantFacts
from tandem.engine.quant.base import LinearMethod, PlainMethod
from tandem.engine.quant.dense import DenseMethod, PackedMethod
from tandem.engine.quant.fp8 import FP8Method
from tandem.protocol.errors import InvalidParameter

FP8_CAPABILITY = (8, 9)
"""Minimum compute capability with e4m3."""


def select_method(device: torch.device, dtype: torch.dtype) -> PlainMethod:
    """Return the method for plain weights: packed on a CPU with oneDNN for ``dtype``, else
    dense."""
    if device.type == "cpu" and PackedMethod.available(dtype):
        return PackedMethod()
    return DenseMethod()


def method_of(facts: QuantFacts | None, plain: PlainMethod, device: torch.device) -> LinearMethod:
    """Return the method for the form in config.json. Raises InvalidParameter if ``device`` cannot
    multiply it."""
    if facts is None:
        return plain
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        allowed = f"weights that are not fp8 on {name}: compute capability 8.9 or later has e4m3"
        raise InvalidParameter("config.json: quantization_config.quant_method", "fp8", allowed)
    return FP8Method(facts, plain)
