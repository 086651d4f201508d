"""Which tokens a step wants: a draw for each choice of each row of logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Draws:
    """The draws of one step, row by row, within a row in the order of its choices."""

    rows: NDArray[np.int64]
    """Row of the logits of each draw."""
    choices: NDArray[np.int64]
    """Choice of the request that each draw is for."""
    one_a_row: bool
    """Whether draw i is of row i of the logits, for each row."""

    @classmethod
    def of(cls, choices: Sequence[Sequence[int]]) -> Draws:
        """From the choices of each row of logits."""
        counts = np.fromiter(map(len, choices), dtype=np.int64, count=len(choices))
        flat = [choice for each in choices for choice in each]
        rows = np.repeat(np.arange(len(choices)), counts)
        return cls(rows, np.array(flat, dtype=np.int64), bool((counts == 1).all()))

    def within(self, part: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The draws of the logits rows in ``part`` (ascending), and the place in ``part`` of each
        one's row."""
        if self.one_a_row:
            return part, np.arange(len(part))
        draws = np.flatnonzero(np.isin(self.rows, part))
        return draws, np.searchsorted(part, self.rows[draws])
