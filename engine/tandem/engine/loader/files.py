"""Index of a prepared folder: the file and the offset of each tensor; no tensor is read.

``config.weight_files`` names the files; without an index the caller reads their headers. The
library maps tensors but does not report their offsets, which a reader with buffers of its own
needs. A file is 8 bytes of length, a JSON object, then the bytes; offsets count from there.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from tandem.engine.config.weight_files import INDEX, indexed, unindexed
from tandem.engine.loader.errors import BadWeightsFile, WeightsNotFound


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The weight files of one folder."""

    files: tuple[Path, ...]
    """Sorted by name, all present."""
    owners: dict[str, Path] | None
    """Tensor to file by the index; None without an index."""


def weight_files(folder: Path) -> WeightFiles:
    """Return the weight files. Raises WeightsNotFound that names the missing file, BadWeightsFile
    for a broken index."""
    try:
        owners = indexed(folder)
    except ValueError as error:
        raise BadWeightsFile(str(error)) from error
    files = unindexed(folder) if owners is None else tuple(sorted(set(owners.values())))
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise WeightsNotFound(
            f"{folder} lacks {len(missing)} of {len(files)} weight files "
            f"that {INDEX} names: {', '.join(missing[:3])}"
        )
    if not files:
        raise WeightsNotFound(f"{folder} holds no *.safetensors")
    return WeightFiles(files, owners)


FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types, by safetensors' names, of plain weights; others need a scale or a table."""
CODES = {"F8_E4M3": torch.float8_e4m3fn, "I8": torch.int8, "U8": torch.uint8, "I32": torch.int32}
"""Other types that a form of weights may use, held unchanged."""
TYPES = {**FLOATS, **CODES}
_MOST_BYTES = 100 << 20


class Place(NamedTuple):
    """One tensor's bytes."""

    dtype: str
    """Name of the type in safetensors."""
    shape: tuple[int, ...]
    offset: int
    """Offset from the start of the file."""


def places_in(path: Path) -> dict[str, Place]:
    """Return every tensor of the file. Raises BadWeightsFile."""
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
