"""Numbers that JSON does not have, or that no double holds: NaN, Infinity, 1e400.

The parser reads them all. A field of a number checks its own range. Here they are found in values
whose numbers are not checked, as in a schema or in arguments of a template.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

from pydantic_core import from_json

from tandem.protocol.errors import InvalidParameter
from tandem.router.http.errors import MAX_NAME, shortened

MAX_INTEGER = 2**63 - 1
"""Largest value of a field that has no smaller bound."""
_SUSPECT = re.compile(rb"NaN|Infinity|[0-9][eE]\+?[0-9]{3}")


def check_finite(body: bytes) -> None:
    """Raise InvalidParameter that names the first number in ``body``, which is JSON, that is not
    finite."""
    if _SUSPECT.search(body) is None:
        return
    for path, value in _walked(from_json(body)):
        if isinstance(value, float) and not math.isfinite(value):
            raise InvalidParameter(shortened(path, MAX_NAME), value, "a finite number")


def _walked(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield all values in ``value`` with their paths, in order."""
    left = [("", value)]
    while left:
        path, each = left.pop()
        yield path, each
        if isinstance(each, dict):
            inner = [(f"{path}.{key}" if path else key, at) for key, at in each.items()]
        elif isinstance(each, list):
            inner = [(f"{path}[{index}]", at) for index, at in enumerate(each)]
        else:
            continue
        left += reversed(inner)
