"""One rank's part of a tensor: the arithmetic of slices, without any tensor.

Shapes are always given whole, as config.json has them; a ``Shard`` says which part a rank wants.
"""

from __future__ import annotations

from dataclasses import dataclass

from tandem.engine.loader.errors import WrongShape


@dataclass(frozen=True, slots=True)
class Shard:
    """Part ``rank`` of ``size`` equal parts along dimension ``dim``."""

    rank: int
    size: int
    dim: int = 0

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.size, f"rank {self.rank} of {self.size}"
        assert self.dim >= 0, f"dimension {self.dim}"

    def slices(self, name: str, shape: tuple[int, ...]) -> tuple[slice, ...]:
        """The slice of each dimension of a tensor of the whole ``shape``.

        Raises WrongShape if the dimension is not there or does not divide evenly.
        """
        if self.dim >= len(shape):
            raise WrongShape(f"{name} of shape {shape} has no dimension {self.dim} to split")
        part, rest = divmod(shape[self.dim], self.size)
        if rest:
            raise WrongShape(
                f"{name} of shape {shape}: {shape[self.dim]} of dimension {self.dim} "
                f"cannot be split evenly over {self.size} ranks"
            )
        whole = [slice(None)] * len(shape)
        whole[self.dim] = slice(self.rank * part, (self.rank + 1) * part)
        return tuple(whole)
