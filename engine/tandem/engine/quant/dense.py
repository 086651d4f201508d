"""Weights as the checkpoint has them."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import linear

from tandem.engine.quant.base import Multiply


class DenseMethod:
    """torch's own linear."""

    name = "dense"

    def load(self, weight: Tensor, bias: Tensor | None) -> Multiply:
        """See LinearMethod."""

        def multiply(x: Tensor) -> Tensor:
            return linear(x, weight, bias)

        return multiply
