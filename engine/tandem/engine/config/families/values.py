"""Checked values of config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tandem.protocol.errors import InvalidParameter


def positive(config: Mapping[str, Any], name: str) -> int:
    """Return a positive integer. Raises InvalidParameter, naming the key."""
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidParameter(f"config.json: {name}", value, "a positive integer")
    return value


def number(name: str, value: Any) -> float:
    """Return a finite number. Raises InvalidParameter, naming the key."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidParameter(f"config.json: {name}", value, "a finite number")
    return float(value)


def above_zero(name: str, value: Any) -> float:
    """Return a finite number above 0. Raises InvalidParameter, naming the key."""
    found = number(name, value)
    if found <= 0:
        raise InvalidParameter(f"config.json: {name}", found, "a number above 0")
    return found


def check_only(config: Mapping[str, Any], values: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise InvalidParameter for a key, unless absent or null, without one of its ``values``."""
    for name, allowed in values.items():
        if config.get(name) is not None and config[name] not in allowed:
            raise InvalidParameter(
                f"config.json: {name}",
                config[name],
                " or ".join(str(each).lower() for each in allowed),
            )
