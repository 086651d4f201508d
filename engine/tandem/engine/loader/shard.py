"""Which part of a matrix one rank holds."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.engine.loader.errors import WrongShape

OUTPUTS, INPUTS = 0, 1
"""Dimensions of a weight [out, in]."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One of ``count`` equal parts along ``dim``; further dimensions are whole."""

    rank: int = 0
    count: int = 1
    dim: int = OUTPUTS

    def span(self, name: str, extent: int, unit: int = 1) -> slice:
        """Return the part of ``extent`` rows or columns. Raises WrongShape if parts are not equal,
        or not multiples of ``unit``, within which a form of weights cannot be cut."""
        if self.count == 1:
            return slice(0, extent)
        size, rest = divmod(extent, self.count)
        if rest or size % unit:
            whole = f"parts of a multiple of {unit}" if unit > 1 else "equal parts"
            raise WrongShape(f"{name}: {extent} cannot be cut into {self.count} {whole}")
        return slice(self.rank * size, (self.rank + 1) * size)

    def part_of(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the part's shape."""
        if self.count == 1:
            return shape
        span = self.span(name, shape[self.dim])
        return (*shape[: self.dim], span.stop - span.start, *shape[self.dim + 1 :])


WHOLE = Shard()
