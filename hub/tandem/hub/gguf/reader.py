"""Metadata and tensors of a GGUF file, by llama.cpp's names. Errors name the key."""

import math
import struct
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

from tandem.hub.errors import UnsupportedModel
from tandem.hub.folder import check_pointer

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_KEYS = 4_096
MAX_NAME_BYTES = 1_024
"""Maximum bytes of a key or a tensor's name."""
MAX_TEXT_BYTES = 16 << 20
MAX_VALUES = 4_000_000
"""Maximum values of all lists."""


class Malformed(Exception):
    """The file is malformed; the text names the fault."""


class EndOfFile(Exception):
    """The file is shorter than it declares; sizes in bytes."""

    def __init__(self, has: int, wants: int) -> None:
        self.has = has
        self.wants = wants
        super().__init__(has, wants)


class Kind(IntEnum):
    """Types of values, by number."""

    BOOL = 7
    STRING = 8
    ARRAY = 9


_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    Kind.BOOL: "B",
    10: "Q",
    11: "q",
    12: "d",
}
"""Characters of ``struct`` for types of one size."""


class Values:
    """Reader of a file's bytes after its magic number."""

    def __init__(self, content: memoryview) -> None:
        """Read the version. Raises Malformed for an unknown one."""
        self._content = content
        self._left = MAX_VALUES
        self.at = len(MAGIC)
        raw = bytes(self._take(4))
        self.order = "<" if int.from_bytes(raw, "little") & 0xFFFF else ">"  # versions are small
        version = int.from_bytes(raw, "little" if self.order == "<" else "big")
        if version not in VERSIONS:
            raise Malformed(f"GGUF version {version}; {', '.join(map(str, VERSIONS))} are read")

    @property
    def size(self) -> int:
        return len(self._content)

    def count(self, what: str, most: int) -> int:
        count = self.number("Q")
        if count > most:
            raise Malformed(f"{count} {what}; at most {most} are read")
        return count

    def number(self, kind: str) -> int:
        form = struct.Struct(self.order + kind)
        number: int = form.unpack(self._take(form.size))[0]
        return number

    def text(self, what: str, most: int = MAX_NAME_BYTES) -> str:
        try:
            return bytes(self._text(what, most)).decode()
        except UnicodeDecodeError:
            raise Malformed(f"{what} is a text that is not UTF-8") from None

    def value(self, kind: int, name: str) -> Any:
        """Return the value of a key: number, bool, text, or list."""
        if kind == Kind.ARRAY:
            kind, count = self.list_head(name)
            if kind == Kind.STRING:
                return [self.text(name, MAX_TEXT_BYTES) for _ in range(count)]
            return self._scalars(kind, count, name)
        if kind == Kind.STRING:
            return self.text(name, MAX_TEXT_BYTES)
        return self._scalars(kind, 1, name)[0]

    def list_head(self, name: str) -> tuple[int, int]:
        kind, count = self.number("I"), self.number("Q")
        if kind == Kind.ARRAY:
            raise Malformed(f"{name} is a list of lists, which are not read")
        self._left -= count
        if self._left < 0:
            raise Malformed(f"lists of more than {MAX_VALUES:,} values in all, at {name}")
        return kind, count

    def skip_list(self, kind: int, count: int, name: str) -> None:
        """Skip the values of a list after its head."""
        if kind == Kind.STRING:
            for _ in range(count):
                self._text(name, MAX_TEXT_BYTES)
        else:
            self._take(struct.calcsize(self.order + self._form(kind, name)) * count)

    def _scalars(self, kind: int, count: int, name: str) -> list[Any]:
        form = struct.Struct(f"{self.order}{count}{self._form(kind, name)}")
        found = list(form.unpack(self._take(form.size)))
        if kind != Kind.BOOL:
            return found
        if any(each > 1 for each in found):
            raise Malformed(f"{name} is neither true nor false")
        return [each == 1 for each in found]

    def _form(self, kind: int, name: str) -> str:
        if kind not in _SCALARS:
            raise Malformed(f"{name} is of type {kind}, which is not known")
        return _SCALARS[kind]

    def _text(self, what: str, most: int) -> memoryview:
        length = self.number("Q")
        if length > most:
            raise Malformed(f"{what} is a text of {length} bytes; at most {most} are read")
        return self._take(length)

    def _take(self, size: int) -> memoryview:
        end = self.at + size
        if end > len(self._content):
            raise EndOfFile(len(self._content), end)
        taken = self._content[self.at : end]
        self.at = end
        return taken


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
    """Rows first, unlike in a file."""
    kind: str
    """Name of ggml's type, such as ``F32``."""
    start: int
    """Offset in the file, in bytes."""
    size: int
    """Bytes of its values."""


@dataclass(frozen=True, slots=True)
class Header:
    """Part of a file before the values of its tensors."""

    keys: dict[str, Any]
    tensors: dict[str, StoredTensor]
    big_endian: bool
    content: npt.NDArray[np.uint8]
    """The whole file, mapped."""


def read_header(path: Path) -> Header:
    """Map ``path`` and read its header. Raises Malformed, EndOfFile or OSError."""
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
            raise Malformed(f"{name} at offset {offset}, which is not a multiple of {alignment}")
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


PLAIN_TYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Tensor types that are not quantised, and their names in safetensors."""
MAX_INTEGER = 2**31 - 1
_PLAIN_DTYPES = {"F32": "f4", "F16": "f2"}
"""numpy's types of values that are read as numbers."""


def _check_start(path: Path) -> None:
    try:
        with path.open("rb") as file:
            start = file.read(64)
    except OSError as error:
        raise UnsupportedModel(f"model: {path} cannot be read: {error.strerror}") from error
    check_pointer(path, start)
    if not start:
        raise UnsupportedModel(f"model: {path} is empty")
    if not start.startswith(MAGIC):
        raise UnsupportedModel(f"model: {path} is not a GGUF file: it begins with {start[:4]!r}")


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Tensor as stored, with separate rows."""

    name: str
    shape: tuple[int, ...]
    """Rows first, as in numpy."""
    kind: str
    """``F32``, ``F16``, ``BF16`` or the name of a quantisation, such as ``Q4_1``."""
    data: npt.NDArray[Any]
    """Mapped from the file: [rows, encoded bytes] if quantised, else [rows, columns]."""

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def rows(self, order: npt.NDArray[np.intp] | None = None) -> npt.NDArray[np.float32]:
        """Return the values in float32; row i is row ``order[i]`` of the file."""
        data = self.data if order is None else self.data[order]
        values = dequantize(data, GGMLQuantizationType[self.kind])
        return np.ascontiguousarray(values.reshape(self.shape), dtype=np.float32)


class GgufModel:
    """Open GGUF file: metadata by key, tensors by name."""

    def __init__(self, path: Path) -> None:
        """Map ``path``. Raises UnsupportedModel unless it is a complete GGUF file."""
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
        return self.text("general.architecture")

    @property
    def keys(self) -> dict[str, Any]:
        return self._header.keys

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key: number, text, bool, or list."""
        return self._header.keys.get(key, default)

    def require(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise UnsupportedModel(f"model: {self.path.name} lacks the key {key}")
        return value

    def own(self, key: str) -> str:
        return f"{self.architecture}.{key}"

    def integer(
        self, key: str, *, least: int = 1, most: int = MAX_INTEGER, default: int | None = None
    ) -> int:
        value = self.require(key) if default is None else self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.refusal(key, value, f"an integer from {least} to {most}")
        return value

    def number(self, key: str, *, default: float | None = None) -> float:
        value = self.require(key) if default is None else self.get(key, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or value <= 0:
            raise self.refusal(key, value, "a finite number above 0")
        return float(value)

    def flag(self, key: str, *, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.refusal(key, value, "true or false")
        return value

    def text(self, key: str, *, default: str | None = None) -> str:
        value = self.require(key) if default is None else self.get(key, default)
        if not isinstance(value, str):
            raise self.refusal(key, value, "a text")
        return value

    def texts(self, key: str) -> list[str]:
        value = self.require(key)
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise self.refusal(key, value, "a list of texts")
        return value

    def token_id(self, name: str, num_tokens: int) -> int | None:
        """Return the id ``tokenizer.ggml.NAME_token_id``, or None."""
        key = f"tokenizer.ggml.{name}_token_id"
        return None if self.get(key) is None else self.integer(key, least=0, most=num_tokens - 1)

    def refusal(self, key: str, value: object, allowed: str) -> UnsupportedModel:
        """Return the error for an unsupported value."""
        shown = f"{value!r:.80}"
        return UnsupportedModel(f"model: {self.path.name} has {key} {shown}; {allowed} is allowed")

    def tensors(self) -> dict[str, GgufTensor]:
        """Return all tensors by llama.cpp's name; no values are read. Raises UnsupportedModel."""
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
