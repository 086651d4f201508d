"""Choice of the form of weights by device and checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import groupby

import torch

from tandem.engine.config.quantization import (
    Fp4Scheme,
    Fp8Scheme,
    GgufScheme,
    GroupedScheme,
    QuantFacts,
    Scheme,
)
from tandem.engine.loader import LinearPart, Weights
from tandem.engine.quant.base import LinearMethod, PlainMethod, Product, SideBySide
from tandem.engine.quant.dense import DenseMethod, PackedMethod
from tandem.engine.quant.fp4 import Fp4Method
from tandem.engine.quant.fp8 import FP8Method
from tandem.engine.quant.gguf import GgufMethod
from tandem.engine.quant.grouped import GroupedMethod
from tandem.engine.quant.int8 import Int8Method
from tandem.engine.quant.scales import scalar
from tandem.protocol.errors import InvalidParameter

logger = logging.getLogger(__name__)

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
        schemes = [facts.scheme("")] if facts.at_load else [each.scheme for each in facts.rules]
        if any(isinstance(each, Fp8Scheme | Fp4Scheme) for each in schemes):
            name = torch.cuda.get_device_name(device)
            allowed = f"weights that are not fp8 on {name}: compute capability 8.9 has e4m3"
            raise InvalidParameter("config.json: quantization_config.quant_method", "fp8", allowed)
    return FormMethod(facts, plain)


class FormMethod:
    """Method of each layer's own scheme; neighbours of several schemes are side by side."""

    name = "forms"

    def __init__(self, facts: QuantFacts, plain: PlainMethod) -> None:
        self._facts = facts
        self._plain = plain
        self._methods: dict[Scheme | None, LinearMethod] = {None: plain}
        if facts.unapplied:
            names = ", ".join(facts.unapplied)
            logger.info("not applied: %s; activations are rounded by row, or not at all", names)

    def load(self, source: Weights, parts: Sequence[LinearPart]) -> Product:
        runs = groupby(parts, lambda part: self._facts.scheme(part.prefix))
        products = [self._of(scheme).load(source, list(run)) for scheme, run in runs]
        for part in parts:
            for end in self._facts.unapplied:
                name = f"{part.prefix}.{end}"
                if name in source and source.spec(name) is not None:
                    scalar(source, name)
        return products[0] if len(products) == 1 else SideBySide(products)

    def _of(self, scheme: Scheme | None) -> LinearMethod:
        if scheme not in self._methods:
            self._methods[scheme] = _method(scheme, self._plain)
        return self._methods[scheme]


def _method(scheme: Scheme | None, plain: PlainMethod) -> LinearMethod:
    assert scheme is not None, "plain layers have the plain method"
    if isinstance(scheme, GgufScheme):
        return GgufMethod(scheme, plain)
    if isinstance(scheme, Fp8Scheme):
        return FP8Method(scheme)
    if isinstance(scheme, GroupedScheme):
        return GroupedMethod(scheme)
    return Fp4Method(scheme) if isinstance(scheme, Fp4Scheme) else Int8Method(scheme)
