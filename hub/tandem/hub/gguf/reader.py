"""A GGUF file's metadata and tensors, with errors that name the key.

A thin, typed layer over the ``gguf`` package's reader, which maps the file instead of loading it.
The names of keys and tensors are llama.cpp's (docs/gguf.md of ggml).
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, dequantize

from tandem.hub.errors import UnsupportedModel
from tandem.hub.safetensors_files import check_pointer

PLAIN_TYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Tensor types that are not quantised, and their names in safetensors and config.json."""


_MAGIC = b"GGUF"


class EndOfFile(Exception):
    """A file ends before what it says it holds; sizes in bytes."""

    def __init__(self, has: int, wants: int) -> None:
        self.has = has
        self.wants = wants
        super().__init__(has, wants)


class _Reader(GGUFReader):  # type: ignore[misc]  # the library ships no types
    """The library's reader, which takes a file's end for whatever it finds there, but not here."""

    def _get(
        self, offset: int, dtype: npt.DTypeLike, count: int = 1, override_order: Any = None
    ) -> npt.NDArray[Any]:
        end = offset + np.dtype(dtype).itemsize * int(count)
        if end > self.data.size:
            raise EndOfFile(self.data.size, end)
        return super()._get(offset, dtype, count, override_order)  # type: ignore[no-any-return]

    def _build_tensors(self, start_offs: int, fields: list[Any]) -> None:
        ends = [start_offs + _end_of(field) for field in fields]
        if ends and max(ends) > self.data.size:
            raise EndOfFile(self.data.size, max(ends))
        super()._build_tensors(start_offs, fields)


def _end_of(field: Any) -> int:
    """Where a tensor's values end, in bytes from the first tensor's start."""
    _, _, _, dims, kind, offset = field.parts
    values, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind[0])]
    count = math.prod(int(each) for each in dims)
    return int(offset[0]) + count // int(values) * int(size)


def _check_start(path: Path) -> None:
    """Raises UnsupportedModel for what is no GGUF file from its first bytes on."""
    try:
        with path.open("rb") as file:
            start = file.read(64)
    except OSError as error:
        raise UnsupportedModel(f"model: {path} cannot be read: {error.strerror}") from error
    check_pointer(path, start)
    if not start:
        raise UnsupportedModel(f"model: {path} is empty")
    if not start.startswith(_MAGIC):
        raise UnsupportedModel(f"model: {path} is no GGUF file: it begins with {start[:4]!r}")


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor as stored: rows stay apart, so they can be reordered before they are decoded."""

    name: str
    shape: tuple[int, ...]
    """Rows first, as numpy and torch have it (GGUF lists the fastest dimension first)."""
    kind: str
    """``F32``, ``F16``, ``BF16`` or the name of a quantisation, such as ``Q4_1``."""
    data: npt.NDArray[Any]
    """Mapped from the file: [rows, encoded bytes] where quantised, else [rows, columns]."""

    @property
    def size(self) -> int:
        """Number of values."""
        return int(np.prod(self.shape, dtype=np.int64))

    def rows(self, order: npt.NDArray[np.intp] | None = None) -> npt.NDArray[np.float32]:
        """The values in float32, row ``order[i]`` at place i."""
        data = self.data if order is None else self.data[order]
        values = dequantize(data, GGMLQuantizationType[self.kind])
        return np.ascontiguousarray(values.reshape(self.shape), dtype=np.float32)


class GgufModel:
    """An open GGUF file: metadata by key, tensors by name."""

    def __init__(self, path: Path) -> None:
        """Maps ``path``; raises UnsupportedModel when it is not one whole GGUF file."""
        self.path = path
        _check_start(path)
        try:
            self._reader = _Reader(path)
        except EndOfFile as end:
            raise UnsupportedModel(
                f"model: {path} is truncated: {end.has} bytes of at least {end.wants}; "
                f"fetch it again"
            ) from end
        except (ValueError, IndexError, KeyError, OSError, OverflowError) as error:
            raise UnsupportedModel(f"model: {path} cannot be read as GGUF: {error}") from error
        if self.get("split.count", 1) > 1:
            raise UnsupportedModel(
                f"model: {path.name} is one of {self.get('split.count')} parts; "
                f"merge them first (llama-gguf-split --merge)"
            )

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the family, which prefixes the family's keys."""
        return str(self.require("general.architecture"))

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key: a number, text, bool, or a list of them; ``default`` if absent."""
        field = self._reader.fields.get(key)
        return default if field is None else field.contents()

    def require(self, key: str) -> Any:
        """The value of a key that must be there."""
        value = self.get(key)
        if value is None:
            raise UnsupportedModel(f"model: {self.path.name} lacks the key {key}")
        return value

    def own(self, key: str, default: Any = None) -> Any:
        """``get`` below the family's prefix."""
        return self.get(f"{self.architecture}.{key}", default)

    def require_own(self, key: str) -> Any:
        """``require`` below the family's prefix."""
        return self.require(f"{self.architecture}.{key}")

    def tensors(self) -> dict[str, GgufTensor]:
        """All tensors by llama.cpp's name, in the file's order; no values are read."""
        return {
            tensor.name: GgufTensor(
                name=tensor.name,
                shape=tuple(int(extent) for extent in reversed(tensor.shape)),
                kind=tensor.tensor_type.name,
                data=tensor.data,
            )
            for tensor in self._reader.tensors
        }
