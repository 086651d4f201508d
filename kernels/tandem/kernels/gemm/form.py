"""How a kernel for a product is built: tables hold it, the rule gives it, launches take it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

ROW_CLASSES = (1, 16, 32, 64, 128)
"""Most rows of each class of sizes that the tables know."""


class Kind(StrEnum):
    """What is folded into a product."""

    PLAIN = "plain"
    """Bias or residual, if any."""
    GATED = "gated"
    """The gated activation after it, from two rows on."""


@dataclass(frozen=True, slots=True)
class Form:
    """How a kernel is built for a shape."""

    outputs: int
    """Of a program."""
    inner: int
    """Taken at a time."""
    split: int = 1
    """Programs that share the inner dimension."""
    stages: int = 3
    warps: int = 4
    stream: bool = False
    """Whether it is the kernel for Hopper (gluon.py); `warps` then says nothing."""
    group: int = 1
    """Tiles of `outputs` that a program of that kernel multiplies with the same rows of x."""


def row_class(rows: int) -> int | None:
    """The smallest class that holds `rows`; None beyond the last."""
    return next((most for most in ROW_CLASSES if rows <= most), None)
