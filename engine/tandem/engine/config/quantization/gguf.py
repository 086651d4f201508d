"""Blocks of a GGUF file: ``quant_method`` gguf, which only Tandem's converter writes."""

from __future__ import annotations

import re
from collections.abc import Mapping

from tandem.engine.config.quantization.keys import Keys
from tandem.engine.config.quantization.schemes import GgufScheme, QuantFacts, Rule

BLOCKS: Mapping[str, tuple[int, int]] = {
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}
"""Inputs and bytes of a block by kind."""


def read_gguf(keys: Keys) -> QuantFacts:
    """Return the kind of each packed layer."""
    kinds, rules = keys.inner("kinds"), []
    for kind, (values, size) in BLOCKS.items():
        names = kinds.names(kind)
        if names:
            pattern = "|".join(map(re.escape, names))
            rules.append(Rule(pattern, GgufScheme(kind, values, size)))
    kinds.end()
    keys.end()
    return QuantFacts(tuple(rules))
