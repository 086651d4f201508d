"""Forms of ModelOpt: hf_quant_config.json, or ``quant_method`` modelopt in config.json."""

from __future__ import annotations

import fnmatch
import re
from typing import Any

from tandem.engine.config.quantization.keys import Keys, check_kv
from tandem.engine.config.quantization.schemes import (
    Fp4Kind,
    Fp4Scheme,
    Fp8Scheme,
    Granularity,
    QuantFacts,
    Rule,
    Scheme,
)

_SCHEMES: dict[str, Scheme] = {
    "FP8": Fp8Scheme(Granularity.TENSOR),
    "NVFP4": Fp4Scheme(Fp4Kind.NV_MODELOPT),
}
_GROUP = 16
_KV = ("k_scale", "v_scale")
_BITS = {"FP8": 8, "NVFP4": 4}


def read_modelopt(keys: Keys) -> QuantFacts:
    """Return the form of all layers but the excluded ones."""
    algorithm = keys.one_of("quant_algo", *_SCHEMES)
    keys.one_of("group_size", *((_GROUP, None) if algorithm == "NVFP4" else (None,)))
    cached = keys.one_of("kv_cache_quant_algo", "FP8", None) is not None
    cached = check_kv(keys) or cached
    _check_groups(keys, algorithm)
    keys.any("producer")
    excluded = [
        Rule(fnmatch.translate(each) if "*" in each else rf"{re.escape(each)}(\..*)?", None)
        for name in ("exclude_modules", "ignore")
        for each in keys.names(name)
    ]
    keys.end()
    unapplied = ("input_scale", *(_KV if cached else ()))
    return QuantFacts((*excluded, Rule(".*", _SCHEMES[algorithm])), unapplied=unapplied)


def _check_groups(keys: Keys, algorithm: str) -> None:
    """Check that config_groups, which repeat the algorithm, agree with it."""
    if keys.any("config_groups") is None:
        return
    groups = keys.inner("config_groups")
    for name in keys.any("config_groups"):
        group = groups.inner(name)
        group.names("targets")
        for part in ("weights", "input_activations"):
            found = group.inner(part)
            found.one_of("num_bits", _BITS[algorithm])
            found.one_of("type", "float")
            found.one_of("group_size", _GROUP, None)
            found.end(("dynamic",))
        group.end()


def from_file(content: dict[str, Any]) -> dict[str, Any]:
    """Return the quantization_config that hf_quant_config.json stands for."""
    found = content.get("quantization")
    others = {key: value for key, value in content.items() if key != "quantization"}
    return {"quant_method": "modelopt", **(found if isinstance(found, dict) else {}), **others}
