"""MXFP4 of gpt-oss: ``quant_method`` mxfp4, of the experts only."""

from __future__ import annotations

import fnmatch

from tandem.engine.config.quantization.keys import KEPT, Keys
from tandem.engine.config.quantization.schemes import Fp4Kind, Fp4Scheme, QuantFacts, Rule, within


def read_mxfp4(keys: Keys) -> QuantFacts:
    """Return the form of the experts but those of layers that the config leaves plain."""
    kept = [
        Rule(f"{fnmatch.translate(each)}|{fnmatch.translate(f'{each}.*')}", None)
        if "*" in each
        else Rule(within(each), None)
        for name in KEPT
        for each in keys.names(name)
    ]
    keys.one_of("dequantize", False, None)
    keys.end()
    return QuantFacts((*kept, Rule(r".*\.experts", Fp4Scheme(Fp4Kind.STACKED))))
