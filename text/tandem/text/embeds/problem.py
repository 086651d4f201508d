"""What both readers of tensors give, and say where there is none."""

from __future__ import annotations

from dataclasses import dataclass


class NotATensor(Exception):
    """The bytes are no file of one tensor that is read here; the text says in what."""


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """One tensor within the bytes of a file."""

    dtype: str
    """In torch's words: float32."""
    shape: tuple[int, ...]
    values: memoryview
    """All of its values and no more, in order, little-endian."""


MAX_DIMENSIONS = 3
MAX_VALUES = 1 << 40


def num_values(shape: tuple[int, ...]) -> int:
    """Values of a tensor of this shape. Raises NotATensor for what is none, or beyond all bounds:
    the product of a stranger's numbers stays small."""
    if len(shape) > MAX_DIMENSIONS:
        raise NotATensor(f"it has {len(shape)} dimensions, not two")
    total = 1
    for each in shape:
        if not 0 <= each <= MAX_VALUES:
            raise NotATensor("its shape is out of all bounds")
        total *= each
    if total > MAX_VALUES:
        raise NotATensor("its shape is out of all bounds")
    return total
