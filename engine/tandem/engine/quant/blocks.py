"""Products of weights in blocks, read from the file's bytes at each use."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from tandem.engine.delta import Rows
from tandem.engine.quant.base import ComposedProduct, Product
from tandem.kernels import Backend, NoBackend
from tandem.kernels.packed_gemm import Packed, PackedWeights, packed_linear_add

logger = logging.getLogger(__name__)

COMPARED_OUTPUTS = 1024
COMPARED_ROWS = (1, 2, 4, 5)
"""Rows of the comparison, one number for each kernel."""
TOLERANCE = 1e-4
"""Difference of a product from the reference, in largest results."""


class BlockProduct(ComposedProduct):
    """Weights of several kinds, their outputs in order. Results are rounded once, to x's type."""

    def __init__(self, parts: Sequence[Packed], bias: Tensor | None, backends: Backends) -> None:
        self._weights = PackedWeights(parts)
        self._bias = None if bias is None else bias.float()
        self._backends = backends
        self._backend = backends.of(parts)

    def __call__(self, x: Tensor, rows: Rows | None = None) -> Tensor:
        return self.in_float32(x).to(x.dtype)

    def in_float32(self, x: Tensor) -> Tensor:
        y = x.new_zeros(x.shape[0], self._weights.outputs, dtype=torch.float32)
        return self._added(x, y if self._bias is None else y.add_(self._bias))

    def add_to(self, residual: Tensor, x: Tensor, rows: Rows | None = None) -> Tensor:
        if residual.dtype != torch.float32 or self._bias is not None:
            return super().add_to(residual, x, rows)
        return self._added(x, residual)

    def part(self, outputs: slice) -> Product:
        first, end, _ = outputs.indices(self._weights.outputs)
        found = [
            Packed(part.blocks[max(first - at.start, 0) : max(end - at.start, 0)], part.kind)
            for part, at in zip(self._weights.parts, self._weights.columns, strict=True)
        ]
        bias = None if self._bias is None else self._bias[outputs]
        return BlockProduct([each for each in found if len(each.blocks)], bias, self._backends)

    def _added(self, x: Tensor, y: Tensor) -> Tensor:
        """Add the product without bias to y, float32 [rows, out]."""
        return packed_linear_add(x.float(), self._weights, y, backend=self._backend)


class Backends:
    """Choice of the product of each kind: LLVM's, if it is that of the reference here."""

    def __init__(self) -> None:
        self._by_kind: dict[str, Backend] = {}

    def of(self, parts: Sequence[Packed]) -> Backend:
        """Return the backend for all parts. Each kind is compared on the first part of it."""
        for part in parts:
            if part.kind not in self._by_kind:
                self._by_kind[part.kind] = _compared(part)
        slow = any(self._by_kind[part.kind] is Backend.TORCH for part in parts)
        return Backend.TORCH if slow else Backend.LLVM


def _compared(part: Packed) -> Backend:
    started = time.perf_counter()
    fault = _fault(Packed(part.blocks[:COMPARED_OUTPUTS], part.kind))
    if fault is not None:
        logger.warning("%s: %s; the slow reference multiplies", part.kind, fault)
        return Backend.TORCH
    seconds = time.perf_counter() - started
    logger.info("%s: products compiled and checked in %.2f s", part.kind, seconds)
    return Backend.LLVM


def _fault(part: Packed) -> str | None:
    """Return what is wrong with LLVM's product of ``part``, or None."""
    draw = torch.Generator().manual_seed(0)
    weights = PackedWeights([part])
    for rows in COMPARED_ROWS:
        x = torch.randn(rows, weights.inputs, generator=draw)
        want, got = (torch.zeros(rows, weights.outputs) for _ in range(2))
        packed_linear_add(x, weights, want, backend=Backend.TORCH)
        try:
            packed_linear_add(x, weights, got, backend=Backend.LLVM)
        except (ImportError, NoBackend, RuntimeError) as error:
            return f"products cannot be compiled ({error})"
        worst, scale = float((got - want).abs().max()), float(want.abs().max())
        if not worst <= TOLERANCE * scale:
            return f"LLVM's product of {rows} rows differs from the reference by {worst:.3g}"
    return None
