"""fp8 of transformers and vLLM: ``quant_method`` fp8 and fbgemm_fp8."""

from __future__ import annotations

from tandem.engine.config.quantization.keys import Keys, kept_rules
from tandem.engine.config.quantization.schemes import (
    FP8_BLOCK,
    Fp8Scheme,
    Granularity,
    QuantFacts,
    Rule,
)

STATIC = ("input_scale", "activation_scale")
"""Ends of the names of static scales of activations, of vLLM and transformers."""


def read_fp8(keys: Keys) -> QuantFacts:
    """Return the form of blocks, or of a scale per tensor without weight_block_size."""
    static = keys.one_of("activation_scheme", "dynamic", "static") == "static"
    block = keys.any("weight_block_size")
    if block is not None and block != list(FP8_BLOCK):
        raise keys.refused("weight_block_size", f"{list(FP8_BLOCK)}, or leave it out")
    if block is not None and static:
        raise keys.refused("activation_scheme", "dynamic with weight_block_size")
    keys.one_of("fmt", "e4m3", None)
    keys.one_of("scale_fmt", "float", "ue8m0", None)
    keys.one_of("expert_dtype", "fp8", None)
    rules = kept_rules(keys)
    keys.end()
    scheme = Fp8Scheme(Granularity.TENSOR if block is None else Granularity.BLOCK)
    return QuantFacts((*rules, Rule(".*", scheme)), unapplied=STATIC if static else ())


def read_fbgemm(keys: Keys) -> QuantFacts:
    """Return the form of a scale per output. The upper bound of activation scales is not
    applied."""
    bound = keys.any("activation_scale_ub")
    if bound is not None and (isinstance(bound, bool) or not isinstance(bound, int | float)):
        raise keys.refused("activation_scale_ub", "a number")
    rules = kept_rules(keys)
    keys.end()
    unapplied = () if bound is None else ("input_scale_ub",)
    scheme = Fp8Scheme(Granularity.CHANNEL)
    return QuantFacts((*rules, Rule(".*", scheme)), unapplied=unapplied)
