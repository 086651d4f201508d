"""Addends of linear layers, such as adapters'."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, TypeVar

from torch import Tensor

Input = TypeVar("Input")


class Rows(Protocol):
    """Sequences and positions of a product's rows, made when a property is read."""

    @property
    def positions(self) -> Tensor:
        """Return each row's position in its sequence, int64 [rows]."""
        ...

    @property
    def sequences(self) -> Tensor:
        """Return each row's sequence in the step's order, int64 [rows]."""
        ...

    def given(self, kind: type[Input]) -> Iterator[Input]:
        """Yield the inputs of one kind that the step has in addition to its tokens."""
        ...


class Delta(Protocol):
    """Addend of a linear layer's product, such as an adapter's."""

    def __call__(self, x: Tensor, rows: Rows | None) -> Tensor:
        """Return [tokens, out] of x [tokens, in]. If ranks sum the layer's products, x is this
        rank's part and the result a partial sum."""
        ...
