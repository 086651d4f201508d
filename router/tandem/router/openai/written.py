"""Values as clients wrote them, in JSON, for error messages: never longer than a line.

A client's value may be megabytes, so no more of it is written out than is shown.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence, Set
from itertools import islice

MAX_SHOWN = 120
"""Characters of a value."""
MAX_NAME = 128
"""Characters of a field's name: a client's own keys may stand in it."""
_MAX_ITEMS = 12
_MAX_DEPTH = 4
_MAX_BITS = 1024
"""Bits of a whole number: Python takes long to write out large ones, and refuses the largest."""


def shortened(text: str, length: int) -> str:
    """Return the text, or its beginning and three points when it is longer than ``length``."""
    return text if len(text) <= length else text[: length - 3] + "..."


def written(value: object) -> str:
    """Return the value in JSON, cut off with three points if it is long or deep."""
    text = shortened(_write(value, _MAX_DEPTH), MAX_SHOWN)
    return text.encode(errors="replace").decode()


def _write(value: object, depth: int) -> str:
    if isinstance(value, str):
        return json.dumps(value[: MAX_SHOWN + 1], ensure_ascii=False)
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        return "a number of more than 300 digits"
    if isinstance(value, Mapping):
        inner = [f"{_write(str(k), 0)}: {_write(v, depth - 1)}" for k, v in _some(value, depth)]
        return "{" + ", ".join([*inner, *_more(value, inner)]) + "}"
    if isinstance(value, Sequence | Set) and not isinstance(value, bytes):
        inner = [_write(each, depth - 1) for each in islice(value, _MAX_ITEMS if depth > 0 else 0)]
        return "[" + ", ".join([*inner, *_more(value, inner)]) + "]"
    try:
        return json.dumps(value)
    except (TypeError, ValueError):
        return shortened(repr(value), MAX_SHOWN)


def _some(value: Mapping[object, object], depth: int) -> list[tuple[object, object]]:
    return list(islice(value.items(), _MAX_ITEMS if depth > 0 else 0))


def _more(
    value: Mapping[object, object] | Sequence[object] | Set[object], some: list[str]
) -> list[str]:
    return ["..."] if len(value) > len(some) else []
