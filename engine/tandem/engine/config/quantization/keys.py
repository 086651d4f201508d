"""Keys of a quantization config; those that nothing reads are refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tandem.engine.config.quantization.schemes import Rule, within
from tandem.protocol.errors import InvalidParameter

FIELD = "config.json: quantization_config"
_OFF: tuple[Any, ...] = (None, False, "", [], {})
OBSERVED = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype")
"""Arguments of the calibration, and types that the tensors have anyway."""
KEPT = ("modules_to_not_convert", "ignored_layers")
"""Keys of layers that are left plain, of transformers and vLLM."""


class Keys:
    """One object of the config, and which of its keys were read."""

    def __init__(self, values: Any, where: str = FIELD) -> None:
        """``where`` names the object in errors. Raises InvalidParameter if it is not one."""
        if not isinstance(values, Mapping):
            raise InvalidParameter(where, values, "an object")
        self._values = values
        self._where = where
        self._read: set[str] = set()

    def one_of(self, name: str, *allowed: Any) -> Any:
        """Return the value, one of ``allowed``; None among them allows that it is absent."""
        value = self.any(name)
        if not any(type(value) is type(each) and value == each for each in allowed):
            words = ", ".join(str(each) for each in allowed if each is not None)
            if None in allowed:
                words = f"{words}, or leave it out" if words else "leave it out"
            raise self.refused(name, words if len(allowed) == 1 else f"one of {words}")
        return value

    def any(self, name: str) -> Any:
        """Return the value; None if it is absent."""
        self._read.add(name)
        return self._values.get(name)

    def names(self, name: str) -> list[str]:
        """Return a list of names; empty if it is absent."""
        found = self.any(name) or []
        if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
            raise self.refused(name, "a list of names of layers")
        return found

    def inner(self, name: str) -> Keys:
        """Return the object under a key."""
        return Keys(self.any(name), f"{self._where}.{name}")

    def refused(self, name: str, allowed: str) -> InvalidParameter:
        """Return the error for the value of ``name``."""
        return InvalidParameter(f"{self._where}.{name}", self._values.get(name), allowed)

    def pattern(self, name: str, expression: str) -> str:
        """Return the pattern of prefixes that begin with a match of ``expression``, a part of the
        value of ``name``."""
        try:
            re.compile(expression)
        except re.error as error:
            raise self.refused(name, f"regular expressions ({error})") from error
        return f"(?:{expression}).*"

    def end(self, silent: tuple[str, ...] = ()) -> None:
        """Raise InvalidParameter for a key that was not read, has a value, and is not ``silent``,
        without effect on the numbers."""
        for name, value in self._values.items():
            if name not in self._read and name not in silent and value not in _OFF:
                raise self.refused(name, f"only {', '.join(sorted(self._read))}")


def kept_rules(keys: Keys, names: tuple[str, ...] = KEPT) -> tuple[Rule, ...]:
    """Return the rules of the layers that the lists under ``names`` leave plain. An entry is
    a part of a prefix, or a pattern after "re:"."""
    return tuple(
        Rule(keys.pattern(name, each[3:]) if each.startswith("re:") else within(each), None)
        for name in names
        for each in keys.names(name)
    )


def check_kv(keys: Keys) -> bool:
    """Return whether ``kv_cache_scheme`` describes KV of fp8, which kv_cache_dtype decides."""
    if keys.any("kv_cache_scheme") is None:
        return False
    scheme = keys.inner("kv_cache_scheme")
    scheme.one_of("num_bits", 8)
    scheme.one_of("type", "float")
    scheme.one_of("dynamic", False, None)
    scheme.one_of("symmetric", True, None)
    scheme.one_of("strategy", "tensor", "attn_head", None)
    scheme.end(OBSERVED)
    return True
