"""Check of a command's output path before the work, whose result would be lost."""

from __future__ import annotations

from pathlib import Path

from tandem.protocol.errors import InvalidParameter


def check_place(param: str, path: str | None) -> None:
    """Raise InvalidParameter if a file that is written at the end is a folder, or has no folder."""
    if path is not None and (not Path(path).parent.is_dir() or Path(path).is_dir()):
        raise InvalidParameter(param, path, "a file in a folder that is there")
