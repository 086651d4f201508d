"""Forms of a product's kernel, from tables or the rule, for launches."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

ROW_CLASSES = (1, 16, 32, 64, 128)
"""Maximum rows of each class of sizes in the tables."""


class Kind(StrEnum):
    """Operation that is folded into a product."""

    PLAIN = "plain"
    """Bias or residual, if any."""
    GATED = "gated"
    """The gated activation after it, from two rows on."""


@dataclass(frozen=True, slots=True)
class Form:
    """Build parameters of a kernel for one shape."""

    outputs: int
    """Outputs of a program."""
    inner: int
    """Elements of the inner dimension in one iteration."""
    split: int = 1
    """Programs that share the inner dimension."""
    stages: int = 3
    warps: int = 4
    stream: bool = False
    """Whether the form is the kernel for Hopper (gluon.py), which ignores `warps`."""
    group: int = 1
    """Tiles of `outputs` that a program of that kernel multiplies with the same rows of x."""


def row_class(rows: int) -> int | None:
    """Return the smallest class that holds `rows`; None beyond the last."""
    return next((most for most in ROW_CLASSES if rows <= most), None)
