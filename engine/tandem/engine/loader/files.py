"""Which file of a prepared folder holds which tensor, and where in it; no tensor is touched.

``model.safetensors.index.json`` decides where it is there; otherwise ``model.safetensors``, or else
every ``*.safetensors`` of the folder, whose headers are asked by the caller. The library maps
tensors but does not say where their bytes lie, which a reader with buffers of its own must know:
8 bytes of length, a JSON object, then the bytes; offsets count from there.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from tandem.engine.loader.errors import BadWeightsFile, WeightsNotFound

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The weight files of one folder."""

    files: tuple[Path, ...]
    """Sorted by name, all present."""
    owners: dict[str, Path] | None
    """Tensor to file as the index says; None without an index."""


def weight_files(folder: Path) -> WeightFiles:
    """Raises WeightsNotFound naming what is missing, BadWeightsFile for a broken index."""
    index = folder / INDEX
    if index.is_file():
        owners = _read_index(index)
        files = tuple(sorted(set(owners.values())))
    else:
        owners, files = None, _without_index(folder)
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise WeightsNotFound(
            f"{folder} lacks {len(missing)} of {len(files)} weight files "
            f"that {INDEX} names: {', '.join(missing[:3])}"
        )
    if not files:
        raise WeightsNotFound(f"{folder} holds no *.safetensors")
    return WeightFiles(files, owners)


def _without_index(folder: Path) -> tuple[Path, ...]:
    single = folder / SINGLE
    return (single,) if single.is_file() else tuple(sorted(folder.glob("*.safetensors")))


def _read_index(path: Path) -> dict[str, Path]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BadWeightsFile(f"{path} is not JSON: {error}") from error
    names = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(names, dict):
        raise BadWeightsFile(f"{path} has no weight_map")
    for tensor, file in names.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise BadWeightsFile(f"{path}: {tensor} is in {file!r}, which is no file of the folder")
    return {tensor: path.parent / file for tensor, file in names.items()}


FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types, in safetensors' words, that mean weights as they are; others need a scale or a table."""
CODES = {"F8_E4M3": torch.float8_e4m3fn, "I8": torch.int8, "U8": torch.uint8, "I32": torch.int32}
"""The others that a form of weights may ask for, held as they are."""
TYPES = {**FLOATS, **CODES}
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
