"""Base of the model families: quirks of a family's config.json, and the module of its layers.

A family needs no torch: the image that fetches models checks whether one can be served.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from tandem.engine.config.facts import ModelFacts
from tandem.protocol.errors import InvalidParameter


class Family:
    """Model whose config.json states everything. Families are subclasses with the differences."""

    architectures: ClassVar[tuple[str, ...]] = ()
    """Names of it in config.json, as the first of ``saved_as`` spells them."""
    saved_as: ClassVar[tuple[str, ...]] = ("ForCausalLM", "ForSequenceClassification", "Model")
    """Endings of a model's saved class names: with a head for tokens, for labels, with none."""
    defaults: ClassVar[Mapping[str, Any]] = {}
    """Values of keys that config.json lacks, or has as null."""
    keys: ClassVar[frozenset[str]] = frozenset()
    """Keys of config.json that only this family follows (``known_keys`` has those of all)."""
    activations: ClassVar[tuple[str, ...]] = ("silu", "swish")
    """Values of hidden_act that its layers compute."""
    layers: ClassVar[str | None] = None
    """The module whose ``load(facts, weights)`` makes the model, imported when weights are loaded;
    None is the decoder that families share."""

    def completed(self, config: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
        """Return ``config`` with defaults and facts from other files of the model's folder."""
        return config

    def facts(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the fields of ModelFacts that do not follow directly from ``config``."""
        return {}

    def check(self, facts: ModelFacts) -> None:
        """Raise InvalidParameter, naming the field, for a shape that this family's layers do not
        compute.

        ``facts`` are of one of its architectures.
        """
        if facts.hidden_act not in self.activations:
            raise InvalidParameter(
                "config.json: hidden_act", facts.hidden_act, f"one of {', '.join(self.activations)}"
            )


def used_window(config: Mapping[str, Any]) -> int | None:
    """Return sliding_window, for families that use it only if use_sliding_window is set."""
    window = config.get("sliding_window")
    used = config.get("use_sliding_window", False) and isinstance(window, int) and window > 0
    return window if used else None
