"""Where each tensor's bytes are in a safetensors file: its header, read without the library.

The library maps tensors but does not say where they lie, which a reader with buffers of its own
must know. The format: 8 bytes of length, a JSON object, then the bytes; offsets count from there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import torch

from tandem.engine.loader.errors import BadWeightsFile

FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types, in safetensors' words, that mean weights as they are; others need a scale or a table."""
_MOST_BYTES = 100 << 20


class Place(NamedTuple):
    """One tensor's bytes."""

    dtype: str
    """In safetensors' words."""
    shape: tuple[int, ...]
    offset: int
    """From the start of the file."""


def places_in(path: Path) -> dict[str, Place]:
    """Every tensor of the file. Raises BadWeightsFile."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= _MOST_BYTES:
                raise BadWeightsFile(f"{path} cannot be read: its header has {length} bytes")
            header = json.loads(file.read(length))
        return {
            name: Place(each["dtype"], tuple(each["shape"]), 8 + length + each["data_offsets"][0])
            for name, each in header.items()
            if name != "__metadata__"
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadWeightsFile(f"{path} cannot be read: {error}") from error
