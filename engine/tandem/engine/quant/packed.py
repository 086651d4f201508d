"""Weights packed for oneDNN once, at load: twice as fast on a CPU at few rows.

torch's linear multiplies float32 by MKL with the weight as it lies, which at one row reads memory
at half speed and at 4 to 64 rows is two to three times slower than oneDNN over blocked weights. The
ops are those that torch's own inductor emits for a frozen weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.engine.quant.base import ComposedProduct, PlainMethod, Product, Rows

_TYPES = (torch.float32, torch.bfloat16)
FEWEST_ROWS = 4
"""Fewer rows are filled up with zeros: oneDNN reads a packed weight a quarter faster for 4 rows
than for 1 or 2, for which it takes a kernel for vectors."""


class PackedProduct(ComposedProduct):
    """A weight in oneDNN's layout."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        self._bias = bias
        self._product = torch.ops.mkldnn._linear_pointwise.default
        self._blank = weight.new_zeros(FEWEST_ROWS, weight.shape[1])

    def __call__(self, x: Tensor, rows: Rows | None = None) -> Tensor:
        """See Product."""
        count = x.shape[0]
        if 0 < count < FEWEST_ROWS:
            x = torch.cat((x, self._blank[count:]))
        result: Tensor = self._product(x, self._packed, self._bias, "none", [], "")
        return result[:count]


class PackedMethod(PlainMethod):
    """oneDNN's linear over a weight in its own layout; the plain weight can be dropped."""

    name = "packed"

    @staticmethod
    def available(dtype: torch.dtype) -> bool:
        """Return whether this torch and CPU support the method for ``dtype``."""
        if dtype not in _TYPES:
            return False
        try:
            ops = torch.ops.mkldnn
            packed = ops._reorder_linear_weight(torch.ones(16, 16, dtype=dtype))
            got = ops._linear_pointwise(
                torch.ones(1, 16, dtype=dtype), packed, None, "none", [], ""
            )
        except (AttributeError, RuntimeError):
            return False
        return bool((got == 16).all())

    def hold(self, weight: Tensor, bias: Tensor | None) -> Product:
        """See PlainMethod."""
        return PackedProduct(weight, bias)
