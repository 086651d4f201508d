"""Keys and checks of families with a mixture of experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tandem.engine.config.experts import ExpertFacts
from tandem.engine.config.facts import ModelFacts
from tandem.engine.config.families.values import positive
from tandem.engine.config.quantization import Fp4Kind, Fp4Scheme, Fp8Scheme, Granularity, Scheme
from tandem.protocol.errors import InvalidParameter

NUM_EXPERTS, OTHER_NUM_EXPERTS = "num_experts", "num_local_experts"
PER_TOKEN = "num_experts_per_tok"
COUNTS = frozenset({NUM_EXPERTS, OTHER_NUM_EXPERTS, PER_TOKEN})
_FORM = "config.json: quantization_config.quant_method"


def counts_of(config: Mapping[str, Any]) -> tuple[int, int]:
    """Return the number of experts, and of those that a token has. Raises InvalidParameter.

    transformers 5 writes num_local_experts for every family.
    """
    name = NUM_EXPERTS if config.get(NUM_EXPERTS) is not None else OTHER_NUM_EXPERTS
    experts, chosen = positive(config, name), positive(config, PER_TOKEN)
    other = config.get(OTHER_NUM_EXPERTS)
    if other not in (None, experts):
        allowed = f"{experts}, as {name}"
        raise InvalidParameter(f"config.json: {OTHER_NUM_EXPERTS}", other, allowed)
    if chosen > experts:
        allowed = f"at most the {experts} experts"
        raise InvalidParameter(f"config.json: {PER_TOKEN}", chosen, allowed)
    return experts, chosen


def flag(config: Mapping[str, Any], name: str) -> bool:
    """Return a boolean; False if it is absent. Raises InvalidParameter, naming the key."""
    value = config.get(name)
    if value is not None and not isinstance(value, bool):
        raise InvalidParameter(f"config.json: {name}", value, "true or false")
    return bool(value)


def check_experts(facts: ModelFacts) -> None:
    """Raise InvalidParameter for experts in a form of weights that is not computed."""
    experts, quantization = facts.experts, facts.quantization
    if quantization is None:
        return
    stacked = Fp4Scheme(Fp4Kind.STACKED)
    has_stacked = experts is not None and experts.names.stacked
    if not has_stacked and any(rule.scheme == stacked for rule in quantization.rules):
        allowed = f"another form: {facts.architecture} has no tensors of all experts"
        raise InvalidParameter(_FORM, "mxfp4", allowed)
    if experts is None:
        return
    for layer in experts.layers:
        prefix = f"model.layers.{layer}.{experts.names.block}.experts"
        schemes = {quantization.scheme(each) for each in matrices(prefix, experts)}
        wrong = [each for each in schemes if not _computed(each, stacked=has_stacked)]
        if wrong or len(schemes) > 1:
            found = ", ".join(sorted(type(each).__name__ for each in wrong)) or "several forms"
            allowed = "plain, fp8 in blocks of 128 by 128, or mxfp4 of gpt-oss, for all of a layer"
            raise InvalidParameter(f"{_FORM}: {prefix}", found, allowed)


def matrices(prefix: str, experts: ExpertFacts, number: int = 0) -> list[str]:
    """Return the prefixes of an expert's matrices, or that of the tensors of all experts."""
    names = experts.names
    if names.stacked:
        return [prefix]
    used = (names.gate, names.up, names.down)[-experts.num_products :]
    return [f"{prefix}.{number}.{each}" for each in used]


def _computed(scheme: Scheme | None, *, stacked: bool) -> bool:
    if isinstance(scheme, Fp4Scheme):
        return scheme.kind is Fp4Kind.STACKED
    if isinstance(scheme, Fp8Scheme):
        return scheme.granularity is Granularity.BLOCK and (scheme.at_load or not stacked)
    return scheme is None
