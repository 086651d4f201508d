"""Plain weights, multiplied by the ops of tandem.kernels."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from tandem.engine.delta import Rows
from tandem.engine.loader import LinearPart, Weights
from tandem.engine.loader.files import FLOATS
from tandem.engine.quant.base import (
    ComposedProduct,
    PlainMethod,
    Product,
    merged_bias,
)
from tandem.engine.quant.blocks import Backends, BlockProduct
from tandem.kernels import Backend
from tandem.kernels.activation import Gate
from tandem.kernels.gemm import (
    linear,
    linear_add,
    norm_gated,
    norm_linear,
)
from tandem.kernels.packed_gemm import FORMS, PACKED_LINEAR_ADD, Packed

logger = logging.getLogger(__name__)

KINDS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
MEASURED_ROWS = (1, 4, 16, 64, 256)
LARGE = 1 << 20
"""Weights of a product that is worth a measurement."""
GAIN = 1.3
"""Times by which torch must be faster to be chosen, so that noise does not change results."""


def stored_type(source: Weights, name: str, method: PlainMethod) -> torch.dtype:
    """Return the type in which a matrix is held: the engine's, or on a CPU that of the file if the
    engine's has all its numbers."""
    spec = source.spec(name)
    if spec is None or not isinstance(method, PackedMethod) or not _fits(spec.shape[-1]):
        return source.dtype
    stored = FLOATS.get(spec.dtype)
    halves = stored in (torch.bfloat16, torch.float16)
    return stored if stored and halves and source.dtype == torch.float32 else source.dtype


def _fits(inner: int) -> bool:
    return inner % FORMS["F32"].values == 0


class PackedProduct(BlockProduct):
    """Plain weights as the file has them; torch multiplies from some number of rows on."""

    def __init__(
        self, weights: Sequence[Tensor], bias: Tensor | None, backends: Backends, torch_from: float
    ) -> None:
        parts = [Packed(each.view(torch.uint8), KINDS[each.dtype]) for each in weights]
        super().__init__(parts, bias, backends)
        self._plain = tuple(weights)
        self._torch_from = torch_from

    def _added(self, x: Tensor, y: Tensor) -> Tensor:
        alike = all(each.dtype == x.dtype for each in self._plain)
        if len(x) < self._torch_from or not alike:
            return super()._added(x, y)
        at = 0
        for each in self._plain:
            y[:, at : at + len(each)].add_(functional.linear(x, each))
            at += len(each)
        return y


class PackedMethod(PlainMethod):
    """A CPU's products with weights that stay in the mapped file, in the file's type."""

    name = "packed"

    def __init__(self) -> None:
        self._backends = Backends()
        self._torch_from: dict[torch.dtype, float] = {}

    @staticmethod
    def available(dtype: torch.dtype) -> bool:
        """Return whether this installation can compile products of ``dtype``."""
        try:
            PACKED_LINEAR_ADD.load(Backend.LLVM)
        except ImportError:
            return False
        return dtype in KINDS

    def hold(self, weight: Tensor, bias: Tensor | None) -> Product:
        return self._product([weight], bias)

    def load(self, source: Weights, parts: Sequence[LinearPart]) -> Product:
        names = [f"{each.prefix}.weight" for each in parts]
        types = [stored_type(source, name, self) for name in names]
        weights = [
            source.get(name, each.shape, each.shard, dtype=dtype)
            for name, each, dtype in zip(names, parts, types, strict=True)
        ]
        return self._product(weights, merged_bias(source, parts))

    def _product(self, weights: Sequence[Tensor], bias: Tensor | None) -> Product:
        if not all(_fits(each.shape[1]) for each in weights):
            whole = weights[0] if len(weights) == 1 else torch.cat(list(weights))
            return DenseProduct(whole, bias)
        weights = [each if each.stride(1) == 1 else each.contiguous() for each in weights]
        first = weights[0]
        if first.numel() >= LARGE and first.dtype not in self._torch_from:
            self._torch_from[first.dtype] = _torch_from(first, self._backends)
        most = self._torch_from.get(first.dtype, math.inf)
        return PackedProduct(weights, bias, self._backends, most)


def _torch_from(weight: Tensor, backends: Backends) -> float:
    """Return the rows from which torch multiplies ``weight`` faster on this processor, by a
    measurement; inf if it never does."""
    ours = BlockProduct([Packed(weight.view(torch.uint8), KINDS[weight.dtype])], None, backends)
    times: list[tuple[float, float]] = []
    for rows in MEASURED_ROWS:
        x = torch.zeros(rows, weight.shape[1], dtype=weight.dtype)
        pair = (lambda x=x: ours(x), lambda x=x: functional.linear(x, weight))
        times.append((_least_ms(pair[0]), _least_ms(pair[1])))
    slower = [i for i, (our, theirs) in enumerate(times) if our <= GAIN * theirs]
    first = slower[-1] + 1 if slower else 0
    shown = ", ".join(
        f"{our:.2f} and {theirs:.2f} at {rows}"
        for rows, (our, theirs) in zip(MEASURED_ROWS, times, strict=True)
    )
    found = MEASURED_ROWS[first] if first < len(MEASURED_ROWS) else math.inf
    logger.info(
        "%s: torch multiplies from %s rows on; ms of LLVM and torch: %s",
        *(KINDS[weight.dtype], found, shown),
    )
    return found


def _least_ms(run: Callable[[], object]) -> float:
    found = []
    for _ in range(4):
        started = time.perf_counter()
        run()
        found.append(time.perf_counter() - started)
    return min(found) * 1e3


class DenseProduct(ComposedProduct):
    """A plain weight. With a bias, ops that cannot take one are composed; so are gates but
    SiLU."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor, rows: Rows | None = None) -> Tensor:
        return linear(x, self._weight, self._bias)

    def in_float32(self, x: Tensor) -> Tensor:
        """Return float32; on a GPU the sums are never rounded."""
        return linear(x, self._weight, self._bias, out_dtype=torch.float32)

    def add_to(self, residual: Tensor, x: Tensor, rows: Rows | None = None) -> Tensor:
        if self._bias is not None:
            return super().add_to(residual, x, rows)
        return linear_add(x, self._weight, residual)

    def of_norm(self, x: Tensor, gain: Tensor, eps: float, rows: Rows | None = None) -> Tensor:
        return norm_linear(x, gain, eps, self._weight, self._bias)

    def gated_of_norm(
        self,
        x: Tensor,
        gain: Tensor,
        eps: float,
        rows: Rows | None = None,
        gate: Gate = Gate.SILU,
    ) -> Tensor:
        if self._bias is not None or gate is not Gate.SILU:
            return super().gated_of_norm(x, gain, eps, rows, gate)
        return norm_gated(x, gain, eps, self._weight)

    def part(self, outputs: slice) -> Product:
        bias = None if self._bias is None else self._bias[outputs]
        return DenseProduct(self._weight[outputs], bias)


class DenseMethod(PlainMethod):
    """The checkpoint's own tensors."""

    name = "dense"

    def hold(self, weight: Tensor, bias: Tensor | None) -> Product:
        return DenseProduct(weight, bias)
