"""JSON files of a model's folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tandem.protocol.errors import InvalidParameter


def read_json(path: Path, *, needed: bool) -> dict[str, Any]:
    """Return the object in the file; {} if the file does not exist, unless it is ``needed``.

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
