"""Base of the model families: differences in config.json, and the module of the layers; no
torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from tandem.engine.config.facts import ModelFacts
from tandem.protocol.errors import InvalidParameter


class Family:
    """Model whose config.json states everything; subclasses have the differences."""

    architectures: ClassVar[tuple[str, ...]] = ()
    """Names in config.json, with the first ending of ``saved_as``."""
    saved_as: ClassVar[tuple[str, ...]] = ("ForCausalLM", "ForSequenceClassification", "Model")
    """Endings of saved class names: with a head for tokens, for labels, without one."""
    defaults: ClassVar[Mapping[str, Any]] = {}
    """Values of keys that config.json lacks, or has as null."""
    keys: ClassVar[frozenset[str]] = frozenset()
    """Keys of config.json of this family only (``known_keys`` has those of all)."""
    activations: ClassVar[tuple[str, ...]] = ("silu", "swish")
    layers: ClassVar[str | None] = None
    """Module whose ``load(facts, weights)`` makes the model; None is the shared decoder."""

    def completed(self, config: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
        """Return ``config`` with defaults and facts from other files of the model's folder."""
        return config

    def facts(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the fields of ModelFacts that do not follow directly from ``config``."""
        return {}

    def check(self, facts: ModelFacts) -> None:
        """Raise InvalidParameter, naming the field, for a shape that the layers do not compute."""
        if facts.hidden_act not in self.activations:
            raise InvalidParameter(
                "config.json: hidden_act", facts.hidden_act, f"one of {', '.join(self.activations)}"
            )


def used_window(config: Mapping[str, Any]) -> int | None:
    """Return sliding_window, for families that use it only if use_sliding_window is set."""
    window = config.get("sliding_window")
    used = config.get("use_sliding_window", False) and isinstance(window, int) and window > 0
    return window if used else None
