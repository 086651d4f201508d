"""The form of the weights that config.json states.

A form that is not supported is refused by name. Runs before torch is imported, and before any
weight is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tandem.protocol.errors import InvalidParameter

FP8_BLOCK = (128, 128)
"""Outputs and inputs that share a scale."""
_FIELD = "config.json: quantization_config"
_FP8: Mapping[str, tuple[Any, ...]] = {
    "quant_method": ("fp8",),
    "activation_scheme": ("dynamic",),
    "weight_block_size": (list(FP8_BLOCK),),
    "fmt": ("e4m3", None),
    "scale_fmt": ("float", None),
    "expert_dtype": ("fp8", None),
}
"""Key to the supported values; the last one None if the key may be absent."""
_NEAREST = (
    "; the nearest is the same model in bfloat16, in fp8 with blocks of 128 by 128 (as Qwen3-8B-FP8"
    " is), or as a GGUF file, whose weights are converted"
)
_KEPT = ("modules_to_not_convert", "ignored_layers")
"""Keys of layers that are left plain: the list of transformers and vLLM's."""


@dataclass(frozen=True, slots=True)
class QuantFacts:
    """Weights in fp8 e4m3 with a scale for each block of 128 by 128, activations as they are."""

    kept: tuple[str, ...] = ()
    """Prefixes of layers whose weights are plain."""

    def keeps(self, prefix: str) -> bool:
        """Return whether the layer's weights are plain."""
        return any(prefix == each or prefix.startswith(f"{each}.") for each in self.kept)


def quantization_of(config: Mapping[str, Any]) -> QuantFacts | None:
    """Return the form of a parsed config.json's weights; None is plain. Raises InvalidParameter."""
    found = config.get("quantization_config", config.get("compression_config"))
    if found is None:
        return None
    if not isinstance(found, Mapping):
        raise InvalidParameter(_FIELD, found, "an object")
    for name, allowed in _FP8.items():
        if found.get(name) not in allowed:
            words = ", ".join(str(each) for each in allowed if each is not None)
            raise InvalidParameter(f"{_FIELD}.{name}", found.get(name), f"one of {words}{_NEAREST}")
    unknown = sorted(
        name
        for name, value in found.items()
        if name not in _FP8 and name not in _KEPT and value not in (None, False)
    )
    if unknown:
        known = ", ".join((*_FP8, *_KEPT))
        raise InvalidParameter(f"{_FIELD}.{unknown[0]}", found[unknown[0]], f"only {known}")
    return QuantFacts(tuple(name for key in _KEPT for name in _names(found, key)))


def _names(found: Mapping[str, Any], key: str) -> list[str]:
    names = found.get(key) or []
    if not isinstance(names, list) or not all(isinstance(each, str) for each in names):
        raise InvalidParameter(f"{_FIELD}.{key}", names, "a list of names of layers")
    return names
