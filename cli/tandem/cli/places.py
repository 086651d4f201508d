"""Where a command writes what it found: looked at before the work, which would be lost."""

from __future__ import annotations

from pathlib import Path

from tandem.protocol.errors import InvalidParameter


def check_place(param: str, path: str | None) -> None:
    """Raise InvalidParameter if a file that is written at the end would find no folder then."""
    if path is not None and (not Path(path).parent.is_dir() or Path(path).is_dir()):
        raise InvalidParameter(param, path, "a file in a folder that is there")
