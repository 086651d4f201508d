"""From the last hidden states to logits."""

from __future__ import annotations

from torch import Tensor

from tandem.engine.layers.linear import Linear


class Logits:
    """The head's product, as the head has it: the sampler widens the rows that need it."""

    def __init__(self, head: Linear) -> None:
        self._head = head

    def __call__(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] to [rows, vocabulary] of the same type."""
        return self._head(hidden)
