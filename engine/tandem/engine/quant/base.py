"""Interface of linear layers: a method reads a checkpoint's tensors and returns a product.

Layers hold a ``Product`` and do not depend on the form of weights. A product also takes the norm
before it and the residual stream or activation after it, so that kernels may fuse them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from tandem.engine.delta import Rows
from tandem.engine.loader import LinearPart, Weights
from tandem.kernels.activation import Gate, gated
from tandem.kernels.norm import rms_norm


class Product(Protocol):
    """Product x @ weight.T + bias, with its neighbours.

    ``rows`` are those of x; None outside of a step's sequences, as for the head.
    """

    def __call__(self, x: Tensor, rows: Rows | None = None) -> Tensor:
        """Map [tokens, in] to [tokens, out]."""
        ...

    def in_float32(self, x: Tensor) -> Tensor:
        """Return the product as float32, unrounded if the form allows it."""
        ...

    def add_to(self, residual: Tensor, x: Tensor, rows: Rows | None = None) -> Tensor:
        """Add the product to residual [tokens, out] in place, and return it."""
        ...

    def of_norm(self, x: Tensor, gain: Tensor, eps: float, rows: Rows | None = None) -> Tensor:
        """Return the product of x after RMSNorm with ``gain`` [in]."""
        ...

    def gated_of_norm(
        self,
        x: Tensor,
        gain: Tensor,
        eps: float,
        rows: Rows | None = None,
        gate: Gate = Gate.SILU,
    ) -> Tensor:
        """Return gate(first half) * second half of ``of_norm``: [tokens, out / 2]."""
        ...

    def feed_forward(
        self,
        down: Product,
        residual: Tensor,
        x: Tensor,
        gain: Tensor,
        eps: float,
        rows: Rows | None = None,
        gate: Gate = Gate.SILU,
    ) -> Tensor:
        """Add ``down`` of ``gated_of_norm`` to residual [tokens, out of down] in place; return
        it."""
        ...

    def part(self, outputs: slice) -> Product | None:
        """Return the product of these outputs in the same memory; None if it cannot be cut."""
        ...


class LinearMethod(Protocol):
    """One form of weights."""

    name: str

    def load(self, source: Weights, parts: Sequence[LinearPart]) -> Product:
        """Load the product with the outputs of ``parts`` in order. Raises a LoadError."""
        ...


class PlainMethod(ABC):
    """Form made of plain weights, one tensor a layer."""

    name: str

    @abstractmethod
    def hold(self, weight: Tensor, bias: Tensor | None) -> Product:
        """Return the product with ``weight`` [out, in] plus ``bias`` [out], kept or repacked."""

    def load(self, source: Weights, parts: Sequence[LinearPart]) -> Product:
        weights = [source.get(f"{each.prefix}.weight", each.shape, each.shard) for each in parts]
        return self.hold(_merged(weights), merged_bias(source, parts))


def merged_bias(source: Weights, parts: Sequence[LinearPart]) -> Tensor | None:
    """Return the biases of all parts, concatenated; None if none has one."""
    biases = [each.read_bias(source) for each in parts]
    there = [each for each in biases if each is not None]
    assert len(there) in (0, len(parts)), "some parts have a bias and some have none"
    return _merged(there) if there else None


def _merged(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


class ComposedProduct(ABC):
    """Product whose neighbours are separate ops, without fused kernels."""

    @abstractmethod
    def __call__(self, x: Tensor, rows: Rows | None = None) -> Tensor:
        """See Product."""

    def in_float32(self, x: Tensor) -> Tensor:
        return self(x).float()

    def add_to(self, residual: Tensor, x: Tensor, rows: Rows | None = None) -> Tensor:
        return residual.add_(self(x, rows))

    def of_norm(self, x: Tensor, gain: Tensor, eps: float, rows: Rows | None = None) -> Tensor:
        return self(rms_norm(x, gain, eps), rows)

    def gated_of_norm(
        self,
        x: Tensor,
        gain: Tensor,
        eps: float,
        rows: Rows | None = None,
        gate: Gate = Gate.SILU,
    ) -> Tensor:
        return gated(self.of_norm(x, gain, eps, rows), gate)

    def feed_forward(
        self,
        down: Product,
        residual: Tensor,
        x: Tensor,
        gain: Tensor,
        eps: float,
        rows: Rows | None = None,
        gate: Gate = Gate.SILU,
    ) -> Tensor:
        return down.add_to(residual, self.gated_of_norm(x, gain, eps, rows, gate), rows)

    def part(self, outputs: slice) -> Product | None:
        """Return None: the form cannot be cut."""
        return None


class SideBySide(ComposedProduct):
    """Products of the same x, their outputs in order, for parts that cannot be one."""

    def __init__(self, products: Sequence[Product]) -> None:
        self._products = products

    def __call__(self, x: Tensor, rows: Rows | None = None) -> Tensor:
        return torch.cat([each(x, rows) for each in self._products], 1)

    def in_float32(self, x: Tensor) -> Tensor:
        return torch.cat([each.in_float32(x) for each in self._products], 1)
