"""A safetensors file with one tensor: eight bytes of length, a header in JSON, the values."""

from __future__ import annotations

import re
from dataclasses import dataclass

import msgspec

_MOST_HEADER = 1 << 14
"""Maximum bytes of a header; that of one tensor has about a hundred."""
_MAX_DIMENSIONS = 3
_MAX_VALUES = 1 << 40
_DTYPES = {"F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bfloat16", 2)}
_TORCH_SAVE = re.compile(rb"PK\x03\x04|\x80[\x02-\x05]")
"""The first bytes of a zip, which ``torch.save`` writes, and of a bare pickle."""
_CONVERT = (
    'it is in the format of torch.save; convert it with safetensors.torch.save({"prompt_embeds": '
    "tensor.contiguous()})"
)


class NotATensor(Exception):
    """The bytes are not a safetensors file of one tensor; the text has the reason."""


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """One tensor within the bytes of a file."""

    dtype: str
    """Name of the dtype in torch, such as float32."""
    shape: tuple[int, ...]
    values: memoryview
    """All of its values and no more, in order, little-endian."""


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def read_safetensors(data: bytes) -> SavedTensor:
    """Return the one tensor, under any name. Raises NotATensor."""
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or not 0 < size <= min(_MOST_HEADER, len(data) - 8):
        no_header = "its first 8 bytes are not the length of a header"
        raise NotATensor(_CONVERT if _TORCH_SAVE.match(data) else no_header)
    try:
        header = msgspec.json.decode(data[8 : 8 + size], type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        if len(header) != 1:
            raise NotATensor(f"it holds {len(header)} tensors, not one")
        entry = msgspec.json.decode(next(iter(header.values())), type=_Entry)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise NotATensor("its header is not that of a safetensors file") from error
    dtype, width = _DTYPES.get(entry.dtype, (entry.dtype[:32], 1))
    if entry.dtype not in _DTYPES:
        return SavedTensor(dtype, tuple(entry.shape[:4]), memoryview(b""))
    values = memoryview(data)[8 + size :]
    if entry.data_offsets != (0, len(values)):
        raise NotATensor("its values are not all of what follows its header")
    if _num_values(tuple(entry.shape)) * width != len(values):
        raise NotATensor("its shape is not that of its values")
    return SavedTensor(dtype, tuple(entry.shape), values)


def _num_values(shape: tuple[int, ...]) -> int:
    """Return the number of values, each factor bounded. Raises NotATensor."""
    if len(shape) > _MAX_DIMENSIONS:
        raise NotATensor(f"it has {len(shape)} dimensions, not two")
    total = 1
    for each in shape:
        if not 0 <= each <= _MAX_VALUES:
            raise NotATensor("its shape is out of all bounds")
        total *= each
    if total > _MAX_VALUES:
        raise NotATensor("its shape is out of all bounds")
    return total
