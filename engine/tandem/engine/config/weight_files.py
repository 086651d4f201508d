"""Files of a folder that hold the weights to load; only headers are read.

``model.safetensors.index.json`` decides, else ``model.safetensors``, else every ``*.safetensors``.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.protocol.errors import InvalidParameter


def read_json(path: Path, *, needed: bool) -> dict[str, Any]:
    """Return the object in the file; {} if it does not exist and is not ``needed``.

    Raises InvalidParameter that names the file.
    """
    content = read_any(path) if path.is_file() or needed else {}
    if not isinstance(content, dict):
        raise InvalidParameter("model", str(path), "a JSON object")
    return content


def read_any(path: Path) -> Any:
    """Return the parsed JSON of a file. Raises InvalidParameter that names it."""
    if not path.is_file():
        raise InvalidParameter("model", str(path.parent), f"a folder that holds {path.name}")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidParameter("model", str(path), f"valid JSON ({error})") from error


INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_MOST_BYTES = 100 << 20
"""Upper bound of a header's bytes, by the format."""


def indexed(folder: Path) -> dict[str, Path] | None:
    """Return the file of each tensor by the index; None without an index. Files may be missing.
    Raises ValueError that describes the fault."""
    path = folder / INDEX
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    names = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(names, dict):
        raise ValueError(f"{path} has no weight_map")
    for tensor, file in names.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise ValueError(f"{path}: {tensor} is in {file!r}, which is not in the folder")
    return {tensor: folder / file for tensor, file in names.items()}


def unindexed(folder: Path) -> tuple[Path, ...]:
    """Return the files if there is no index, sorted."""
    single = folder / SINGLE
    return (single,) if single.is_file() else tuple(sorted(folder.glob("*.safetensors")))


@dataclass(frozen=True, slots=True)
class Stored:
    """Place of a tensor in its file."""

    path: Path
    shape: tuple[int, ...]
    dtype: str
    start: int
    """Offset in the file, in bytes."""
    size: int


def shape_of(folder: Path, tensor: str) -> tuple[int, ...] | None:
    """Return the shape of a tensor; None as for ``stored_in``."""
    found = stored_in(folder, tensor)
    return None if found is None else found.shape


def stored_in(folder: Path, tensor: str) -> Stored | None:
    """Return the location of a tensor; None if no readable file has it (the loader reports why)."""
    try:
        owners = indexed(folder)
        files = unindexed(folder) if owners is None else [owners[tensor]]
        found = (_stored_in(path, tensor) for path in files)
        return next((each for each in found if each is not None), None)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def tensors_like(folder: Path, names: re.Pattern[str]) -> dict[str, Stored]:
    """Return the location of each tensor whose whole name matches; {} if a file is not readable
    (the loader reports why)."""
    try:
        owners = indexed(folder)
        files = set(unindexed(folder))
        if owners is not None:
            files = {path for name, path in owners.items() if names.fullmatch(name)}
        return {
            name: _place(path, header, name, start)
            for path, (header, start) in ((each, _header(each)) for each in files)
            for name in header
            if names.fullmatch(name)
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _stored_in(path: Path, tensor: str) -> Stored | None:
    header, start = _header(path)
    return _place(path, header, tensor, start) if tensor in header else None


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """Return a file's header, and the offset of the numbers after it."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return json.loads(file.read(min(length, _MOST_BYTES))), 8 + length


def _place(path: Path, header: dict[str, Any], tensor: str, start: int) -> Stored:
    entry = header[tensor]
    first, end = entry["data_offsets"]
    return Stored(path, tuple(entry["shape"]), entry["dtype"], start + first, end - first)
