"""Models that can be computed here, by their config.json: checked before torch is imported.

The image that fetches models has no torch; the model's Job checks the fetched files with this. A
family is a file of this folder and its class in ``_ALL``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tandem.engine.config.facts import ModelFacts
from tandem.engine.config.families.base import Family
from tandem.engine.config.families.bert import Bert
from tandem.engine.config.families.colbert import ColBert
from tandem.engine.config.families.llama import Llama
from tandem.engine.config.families.qwen2 import Qwen2
from tandem.engine.config.families.qwen3 import Qwen3
from tandem.engine.config.families.roberta import Roberta
from tandem.engine.config.nearest import explained
from tandem.protocol.errors import InvalidParameter

__all__ = ["FAMILIES", "Family", "check_architecture", "check_servable", "family_of"]

_ALL: tuple[type[Family], ...] = (Llama, Qwen2, Qwen3, Bert, Roberta, ColBert)
FAMILIES: dict[str, Family] = {
    name.removesuffix(each.saved_as[0]) + sibling: each()
    for each in _ALL
    for name in each.architectures
    for sibling in each.saved_as
}
"""Architecture, as config.json names it, to its family."""


def family_of(architecture: str) -> Family:
    """Return the family; for an unknown architecture, one that follows config.json without quirks
    (``check_servable`` refuses it)."""
    return FAMILIES.get(architecture) or Family()


def check_architecture(config: Mapping[str, Any]) -> None:
    """Raise InvalidParameter for a parsed config.json whose architecture no family here computes.
    Called before any other key is checked: other architectures name other keys."""
    names = config.get("architectures")
    first = names[0] if isinstance(names, list) and names else None
    if isinstance(first, str) and first not in FAMILIES:
        raise InvalidParameter("config.json: architectures", first, explained(first, FAMILIES))


def check_servable(facts: ModelFacts) -> None:
    """Raise InvalidParameter, naming the field, for a model that no family here computes."""
    check_architecture({"architectures": [facts.architecture]})
    FAMILIES[facts.architecture].check(facts)
