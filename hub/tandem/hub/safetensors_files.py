"""Check that a safetensors file is complete, by the length in its header. Values are not read."""

import json
import struct
from pathlib import Path
from typing import Any

from tandem.hub.errors import UnsupportedModel

_LENGTH = struct.Struct("<Q")
_HEADER_LIMIT = 100 << 20
"""Bound of the header in the format."""
_LFS = b"version https://git-lfs"


def check_whole(path: Path) -> None:
    """Raise UnsupportedModel that names the expected and the actual size."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(_LENGTH.size)
        _check_start(path, start + file.read(len(_LFS) - len(start)), size)
        (length,) = _LENGTH.unpack(start)
        if length > _HEADER_LIMIT:
            raise UnsupportedModel(
                f"model: {path} is not a safetensors file: a header of {length} B"
            )
        _check_size(path, _LENGTH.size + length, size)
        file.seek(_LENGTH.size)
        header = _header(path, file.read(length))
    _check_size(path, _LENGTH.size + length + _data_size(path, header), size)


def check_pointer(path: Path, start: bytes) -> None:
    """Raise UnsupportedModel for a Git LFS pointer."""
    if start.startswith(_LFS):
        raise UnsupportedModel(
            f"model: {path} is a pointer of Git LFS, not the file itself; `git lfs pull` brings it"
        )


def _check_start(path: Path, start: bytes, size: int) -> None:
    if size == 0:
        raise UnsupportedModel(f"model: {path} is empty")
    check_pointer(path, start)
    _check_size(path, _LENGTH.size, size)


def _check_size(path: Path, wanted: int, size: int) -> None:
    if size < wanted:
        raise UnsupportedModel(
            f"model: {path} is truncated: {size} bytes of at least {wanted}; fetch it again"
        )


def _header(path: Path, text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text)
    except ValueError as error:
        raise UnsupportedModel(f"model: {path} is not a safetensors file: {error}") from error
    if not isinstance(header, dict):
        raise UnsupportedModel(
            f"model: {path} is not a safetensors file: its header is not an object"
        )
    return header


def _data_size(path: Path, header: dict[str, Any]) -> int:
    try:
        ends = [int(each["data_offsets"][1]) for key, each in header.items() if key[:2] != "__"]
    except (TypeError, KeyError, IndexError, ValueError) as error:
        raise UnsupportedModel(
            f"model: {path} is not a safetensors file: a tensor without data_offsets"
        ) from error
    if not ends:
        raise UnsupportedModel(f"model: {path} holds no tensors")
    return max(ends)
