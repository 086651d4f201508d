"""The header of a GGUF file: its keys, and where its tensors are. Every count in it is bounded.

The format is docs/gguf.md of ggml.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from tandem.hub.gguf.values import MAGIC, MAX_KEYS, EndOfFile, Malformed, Values

MAX_TENSORS = 65_536
MAX_DIMS = 4
MAX_EXTENT = 1 << 40
MAX_ALIGNMENT = 1 << 20
_DEFAULT_ALIGNMENT = 32
_ALIGNMENT = "general.alignment"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor's place in the file."""

    name: str
    shape: tuple[int, ...]
    """Rows first: a file lists the fastest dimension first."""
    kind: str
    """``F32``, or the name of another type of ggml."""
    start: int
    """Offset of its values in the file, in bytes."""
    size: int
    """Bytes of its values."""


@dataclass(frozen=True, slots=True)
class Header:
    """The part of a file before the values of its tensors."""

    keys: dict[str, Any]
    tensors: dict[str, StoredTensor]
    big_endian: bool
    content: npt.NDArray[np.uint8]
    """The whole file, mapped."""


def read_header(path: Path) -> Header:
    """Map ``path`` and read its header.

    Raises Malformed, EndOfFile, and OSError if the file cannot be read.
    """
    size = path.stat().st_size
    if size < len(MAGIC) + 4:
        raise EndOfFile(size, len(MAGIC) + 4)
    content = np.memmap(path, dtype=np.uint8, mode="r")
    values = Values(memoryview(content))  # type: ignore[arg-type]  # numpy says so from 3.12 on
    num_tensors = values.count("tensors", MAX_TENSORS)
    keys: dict[str, Any] = {}
    for _ in range(values.count("keys", MAX_KEYS)):
        name = values.text("a key")
        if name in keys:
            raise Malformed(f"the key {name} twice")
        keys[name] = values.value(values.number("I"), name)
    described = [_described(values) for _ in range(num_tensors)]
    tensors = _placed(described, values, _alignment_of(keys))
    return Header(keys, tensors, values.order == ">", content)


_Described = tuple[str, tuple[int, ...], str, int]
"""A tensor's name, shape, type and offset from the first tensor's values."""


def _described(values: Values) -> _Described:
    name = values.text("a tensor's name")
    num_dims = values.number("I")
    if not 1 <= num_dims <= MAX_DIMS:
        raise Malformed(f"{num_dims} dimensions of {name}; 1 to {MAX_DIMS} are read")
    extents = [values.number("Q") for _ in range(num_dims)]
    if not all(1 <= extent <= MAX_EXTENT for extent in extents):
        raise Malformed(f"{name} of shape {extents}; each extent is 1 to {MAX_EXTENT}")
    number = values.number("I")
    try:
        kind = GGMLQuantizationType(number)
    except ValueError:
        raise Malformed(f"{name} of type {number}, which is not known") from None
    return name, tuple(reversed(extents)), kind.name, values.number("Q")


def _placed(described: list[_Described], values: Values, alignment: int) -> dict[str, StoredTensor]:
    first = -(-values.at // alignment) * alignment
    tensors: dict[str, StoredTensor] = {}
    for name, shape, kind, offset in described:
        if name in tensors:
            raise Malformed(f"the tensor {name} twice")
        if offset % alignment:
            raise Malformed(f"{name} at offset {offset}, which is no multiple of {alignment}")
        packed, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
        if shape[-1] % packed:
            raise Malformed(f"{name} has rows of {shape[-1]} values; {kind} packs {packed}")
        length = math.prod(shape) // int(packed) * int(size)
        if first + offset + length > values.size:
            raise EndOfFile(values.size, first + offset + length)
        tensors[name] = StoredTensor(name, shape, kind, first + offset, length)
    return tensors


def _alignment_of(keys: dict[str, Any]) -> int:
    alignment = keys.get(_ALIGNMENT, _DEFAULT_ALIGNMENT)
    whole = isinstance(alignment, int) and not isinstance(alignment, bool)
    if not whole or not 1 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise Malformed(f"{_ALIGNMENT} {alignment!r}; a power of two up to {MAX_ALIGNMENT} is read")
    return int(alignment)
