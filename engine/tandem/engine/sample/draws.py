"""Which tokens a step wants: a draw for each choice of each row of logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Draws:
    """The draws of one step, row by row, within a row in the order of its choices."""

    rows: tuple[int, ...]
    """Row of the logits of each draw."""
    choices: tuple[int, ...]
    """Choice of the request that each draw is for."""

    @classmethod
    def of(cls, choices: Sequence[Sequence[int]]) -> Draws:
        """From the choices of each row of logits."""
        if all(len(each) == 1 for each in choices):
            return cls(tuple(range(len(choices))), tuple([each[0] for each in choices]))
        return cls(
            rows=tuple(row for row, each in enumerate(choices) for _ in each),
            choices=tuple(choice for each in choices for choice in each),
        )

    def one_a_row(self, num_rows: int) -> bool:
        """Whether draw i is of row i of the logits, for each row."""
        return self.rows == tuple(range(num_rows))

    def within(self, part: Sequence[int]) -> tuple[list[int], list[int]]:
        """The draws of the logits rows in ``part``, and the place in ``part`` of each one's row."""
        place = {row: at for at, row in enumerate(part)}
        draws = [draw for draw, row in enumerate(self.rows) if row in place]
        return draws, [place[self.rows[draw]] for draw in draws]
