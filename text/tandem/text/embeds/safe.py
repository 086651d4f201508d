"""A safetensors file with one tensor: eight bytes of length, a header in JSON, the values."""

from __future__ import annotations

import msgspec

from tandem.text.embeds.problem import NotATensor, SavedTensor, num_values

_MOST_HEADER = 1 << 14
"""Bytes; of one tensor it has a hundred."""
_DTYPES = {"F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bfloat16", 2)}


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def read_safetensors(data: bytes) -> SavedTensor:
    """The one tensor, whatever its name. Raises NotATensor."""
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or not 0 < size <= min(_MOST_HEADER, len(data) - 8):
        raise NotATensor("it begins as neither of them does")
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
    if num_values(tuple(entry.shape)) * width != len(values):
        raise NotATensor("its shape is not that of its values")
    return SavedTensor(dtype, tuple(entry.shape), values)
