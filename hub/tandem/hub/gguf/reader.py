"""A GGUF file's metadata and tensors, with errors that name the key.

The names of keys and tensors are llama.cpp's (docs/gguf.md of ggml).
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

from tandem.hub.errors import UnsupportedModel
from tandem.hub.gguf.header import Header, StoredTensor, read_header
from tandem.hub.gguf.values import MAGIC, EndOfFile, Malformed
from tandem.hub.safetensors_files import check_pointer

PLAIN_TYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Tensor types that are not quantised, and their names in safetensors and config.json."""
MAX_INTEGER = 2**31 - 1
_PLAIN_DTYPES = {"F32": "f4", "F16": "f2"}
"""numpy's words for types whose values are read as numbers; others are bytes."""


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
    if not start.startswith(MAGIC):
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
        return math.prod(self.shape)

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
            self._header = read_header(path)
        except EndOfFile as end:
            raise UnsupportedModel(
                f"model: {path} is truncated: {end.has} bytes of at least {end.wants}; "
                f"fetch it again"
            ) from end
        except Malformed as error:
            raise UnsupportedModel(f"model: {path} cannot be read as GGUF: {error}") from error
        except (OSError, ValueError) as error:
            raise UnsupportedModel(f"model: {path} cannot be read: {error}") from error
        parts = self.integer("split.count", least=0, default=1)
        if parts > 1:
            raise UnsupportedModel(
                f"model: {path.name} is one of {parts} parts; "
                f"merge them first (llama-gguf-split --merge)"
            )

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the family, which prefixes the family's keys."""
        return self.text("general.architecture")

    @property
    def keys(self) -> dict[str, Any]:
        """All keys with their values: numbers, texts, bools, and lists of them."""
        return self._header.keys

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key: a number, text, bool, or a list of them; ``default`` if absent."""
        return self._header.keys.get(key, default)

    def require(self, key: str) -> Any:
        """The value of a key that must be there."""
        value = self.get(key)
        if value is None:
            raise UnsupportedModel(f"model: {self.path.name} lacks the key {key}")
        return value

    def own(self, key: str) -> str:
        """Return the whole name of a key of the family."""
        return f"{self.architecture}.{key}"

    def integer(
        self, key: str, *, least: int = 1, most: int = MAX_INTEGER, default: int | None = None
    ) -> int:
        """Return a key that is an integer in a range; one without ``default`` must be there."""
        value = self.require(key) if default is None else self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.refusal(key, value, f"an integer from {least} to {most}")
        return value

    def number(self, key: str, *, default: float | None = None) -> float:
        """Return a key that is a finite number above 0."""
        value = self.require(key) if default is None else self.get(key, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or value <= 0:
            raise self.refusal(key, value, "a finite number above 0")
        return float(value)

    def flag(self, key: str, *, default: bool) -> bool:
        """Return a key that is true or false."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.refusal(key, value, "true or false")
        return value

    def text(self, key: str, *, default: str | None = None) -> str:
        """Return a key that is a text."""
        value = self.require(key) if default is None else self.get(key, default)
        if not isinstance(value, str):
            raise self.refusal(key, value, "a text")
        return value

    def texts(self, key: str) -> list[str]:
        """Return a key that is a list of texts."""
        value = self.require(key)
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise self.refusal(key, value, "a list of texts")
        return value

    def token_id(self, name: str, num_tokens: int) -> int | None:
        """Return ``tokenizer.ggml.NAME_token_id``, a token's id; None if it is absent."""
        key = f"tokenizer.ggml.{name}_token_id"
        return None if self.get(key) is None else self.integer(key, least=0, most=num_tokens - 1)

    def refusal(self, key: str, value: object, allowed: str) -> UnsupportedModel:
        """Return the error of a key whose value is not served."""
        shown = f"{value!r:.80}"
        return UnsupportedModel(f"model: {self.path.name} has {key} {shown}; {allowed} is allowed")

    def tensors(self) -> dict[str, GgufTensor]:
        """All tensors by llama.cpp's name, in the file's order; no values are read.

        Raises UnsupportedModel for a type that cannot be decoded.
        """
        stored = self._header.tensors
        for kind in sorted({each.kind for each in stored.values()}):
            self._check_kind(kind)
        return {name: _opened(self._header, each) for name, each in stored.items()}

    def _check_kind(self, kind: str) -> None:
        if kind in PLAIN_TYPES and not (self._header.big_endian and kind == "BF16"):
            return
        if self._header.big_endian:
            raise self.refusal("big-endian values of type", kind, "F32 or F16")
        quantisation = GGMLQuantizationType[kind]
        try:
            dequantize(np.zeros((1, GGML_QUANT_SIZES[quantisation][1]), np.uint8), quantisation)
        except NotImplementedError:
            allowed = "another quantisation, such as Q8_0 or Q4_K,"
            raise self.refusal("tensors of type", kind, allowed) from None


def _opened(header: Header, stored: StoredTensor) -> GgufTensor:
    content = header.content[stored.start : stored.start + stored.size]
    if stored.kind in _PLAIN_DTYPES:
        order = ">" if header.big_endian else "<"
        dtype = np.dtype(_PLAIN_DTYPES[stored.kind]).newbyteorder(order)  # type: ignore[arg-type]
        data = content.view(dtype).reshape(stored.shape)
    else:
        data = content.reshape(*stored.shape[:-1], -1)
    return GgufTensor(stored.name, stored.shape, stored.kind, data)
