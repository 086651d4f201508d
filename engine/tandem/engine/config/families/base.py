"""Base of the model families: differences in config.json, and the module of the layers; no
torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from tandem.engine.config.facts import ModelFacts, RopeFacts
from tandem.engine.config.families.rope import rope_of
from tandem.engine.config.families.values import positive
from tandem.protocol.card import KVKind
from tandem.protocol.errors import InvalidParameter

FULL = "full_attention"
WINDOW = "sliding_attention"


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
    layer_types: ClassVar[Mapping[str, KVKind]] = {FULL: KVKind.FULL}
    """Kinds of layers by their names in layer_types."""
    partial_rotary: ClassVar[bool] = False
    """True if the layers may rotate a part of each head."""

    def completed(self, config: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
        """Return ``config`` with defaults and facts from other files of the model's folder."""
        return config

    def rope(self, config: Mapping[str, Any]) -> RopeFacts:
        """Return the rotary embedding of layers with full attention. Raises InvalidParameter."""
        return rope_of(config)

    def facts(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the fields of ModelFacts that do not follow directly from ``config``."""
        return {}

    def check(self, facts: ModelFacts) -> None:
        """Raise InvalidParameter, naming the field, for a shape that the layers do not compute."""
        if facts.hidden_act not in self.activations:
            raise InvalidParameter(
                "config.json: hidden_act", facts.hidden_act, f"one of {', '.join(self.activations)}"
            )
        if facts.rope.partial != 1.0 and not self.partial_rotary:
            field, part = "config.json: partial_rotary_factor", facts.rope.partial
            raise InvalidParameter(field, part, "1: these layers rotate the whole head")

    def stated_kinds(self, config: Mapping[str, Any]) -> tuple[KVKind, ...]:
        """Return the kind of each layer by layer_types; empty if config.json lacks the key. Raises
        InvalidParameter."""
        names = config.get("layer_types")
        if names is None:
            return ()
        known, count = self.layer_types, positive(config, "num_hidden_layers")
        if not isinstance(names, list) or not all(
            isinstance(name, str) and name in known for name in names
        ):
            allowed = f"a list of {' or '.join(known)}"
            raise InvalidParameter("config.json: layer_types", names, allowed)
        if len(names) != count:
            allowed = f"one for each of the {count} layers"
            raise InvalidParameter("config.json: layer_types", names, allowed)
        return tuple(known[name] for name in names)


WINDOWS: Mapping[str, KVKind] = {FULL: KVKind.FULL, WINDOW: KVKind.WINDOW}
"""Layer types of families with sliding windows."""


def window_of(config: Mapping[str, Any], default: int | None) -> int | None:
    """Return sliding_window, ``default`` if the key is absent; null is None. Raises
    InvalidParameter."""
    window = config.get("sliding_window", default)
    if window is None:
        return None
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        raise InvalidParameter("config.json: sliding_window", window, "a positive integer, or null")
    return window


def windowed(kinds: tuple[KVKind, ...], window: int | None) -> Mapping[str, Any]:
    """Return the fields of layers of which some may have a window. Raises InvalidParameter if they
    have none."""
    if KVKind.WINDOW not in kinds:
        return {"layer_kinds": kinds, "sliding_window": None}
    if window is None:
        allowed = f"a positive integer, in use: layers are of {WINDOW}"
        raise InvalidParameter("config.json: sliding_window", None, allowed)
    return {"layer_kinds": kinds, "sliding_window": window}


def check_rotated(facts: ModelFacts) -> None:
    """Raise InvalidParameter unless pairs of numbers of a head are rotated."""
    rotated = facts.head_dim * facts.rope.partial
    if rotated % 2 or not 0 < rotated <= facts.head_dim or facts.head_dim % 2:
        allowed = f"an even number of the {facts.head_dim} numbers of a head"
        raise InvalidParameter("config.json: partial_rotary_factor", facts.rope.partial, allowed)


def check_local_rope(facts: ModelFacts) -> None:
    """Raise InvalidParameter if the rotary embedding of windows is scaled or partial."""
    local = facts.local_rope
    if local is not None and (local.kind != "default" or local.partial != 1.0):
        field = f"config.json: rope_parameters.{WINDOW}"
        found = {"rope_type": local.kind, "partial_rotary_factor": local.partial}
        raise InvalidParameter(field, found, "rope_type default, over the whole head")
