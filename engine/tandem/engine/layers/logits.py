"""From the last hidden states to logits."""

from __future__ import annotations

from torch import Tensor

from tandem.engine.layers.linear import Linear


class Logits:
    """The head's product in float32: bfloat16 logits of 16 and more are eighths, and tie."""

    def __init__(self, head: Linear) -> None:
        self._head = head

    def __call__(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] to float32 [rows, vocabulary]."""
        return self._head.in_float32(hidden)
