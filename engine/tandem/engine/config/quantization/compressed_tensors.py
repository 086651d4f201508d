"""Forms of compressed-tensors: groups of layers, each with arguments of weights and activations."""

from __future__ import annotations

import re
from collections.abc import Callable

from tandem.engine.config.quantization.awq_gptq import GROUPS
from tandem.engine.config.quantization.keys import OBSERVED, Keys, check_kv
from tandem.engine.config.quantization.schemes import (
    FP8_BLOCK,
    Fp4Kind,
    Fp4Scheme,
    Fp8Scheme,
    Granularity,
    GroupedScheme,
    Int8Scheme,
    Packing,
    QuantFacts,
    Rule,
    Scheme,
)

_SILENT = ("version", "global_compression_ratio", "quantization_status")
_GRANULARITY = {
    "block": Granularity.BLOCK,
    "channel": Granularity.CHANNEL,
    "tensor": Granularity.TENSOR,
}
_MIXED = "mixed-precision"
_LINEAR = "Linear"
_DENSE = "dense"


def read_compressed(keys: Keys) -> QuantFacts:
    """Return the form of each group. Raises InvalidParameter."""
    check_kv(keys)
    _check_sparsity(keys)
    form = keys.one_of("format", *_FORMS, _MIXED, None)
    groups = keys.inner("config_groups")
    named: list[Rule] = []
    classes: list[Rule] = []
    unapplied: set[str] = set()
    for name in keys.any("config_groups"):
        group = groups.inner(name)
        own = group.one_of("format", *_FORMS, None) or form
        if own not in _FORMS:
            raise group.refused("format", f"one of {', '.join(_FORMS)}")
        group.one_of("output_activations", None)
        scheme, names = _FORMS[own](group)
        unapplied.update(names)
        for target in group.names("targets"):
            (classes if target == _LINEAR else named).append(
                Rule(_pattern(group, "targets", target), scheme)
            )
        group.end()
    if not named and not classes:
        raise keys.refused("config_groups", "groups with targets")
    ignored = [Rule(_pattern(keys, "ignore", each), None) for each in keys.names("ignore")]
    keys.end(_SILENT)
    return QuantFacts((*ignored, *named, *classes), unapplied=tuple(sorted(unapplied)))


def _pattern(keys: Keys, name: str, target: str) -> str:
    """Return the pattern of a target's layers: a name, a regular expression, or a class."""
    if target.startswith("re:"):
        return keys.pattern(name, target[3:])
    if "." not in target and target[:1].isupper() and target != _LINEAR:
        if name == "ignore":
            return "(?!)"  # a class without linear layers has nothing to leave plain
        raise keys.refused(name, f"{_LINEAR}, names of layers, or expressions after re:")
    return ".*" if target == _LINEAR else re.escape(target)


def _check_sparsity(keys: Keys) -> None:
    """Check that weights are neither sparse nor transformed."""
    if keys.any("sparsity_config"):
        keys.inner("sparsity_config").one_of("format", _DENSE)
    if keys.any("transform_config"):
        keys.inner("transform_config").one_of("config_groups", {}, None)


def _fp8(group: Keys) -> tuple[Scheme, tuple[str, ...]]:
    weights = _weights(group, "float", 8)
    strategy = weights.one_of("strategy", *_GRANULARITY)
    block = list(FP8_BLOCK) if strategy == "block" else None
    weights.one_of("block_structure", block, *([] if block is None else ["128x128"]))
    weights.one_of("group_size", None)
    weights.one_of("symmetric", True)
    weights.end(OBSERVED)
    return Fp8Scheme(_GRANULARITY[strategy]), _fp8_activations(group)


def _fp8_activations(group: Keys) -> tuple[str, ...]:
    """Return the ends of names of static scales."""
    if group.any("input_activations") is None:
        return ()
    acts = _arguments(group, "input_activations", "float", 8)
    acts.one_of("symmetric", True)
    static = acts.one_of("dynamic", True, False) is False
    strategy = acts.one_of("strategy", *(("tensor",) if static else ("token", "tensor", "group")))
    acts.one_of("group_size", *((FP8_BLOCK[1],) if strategy == "group" else (None,)))
    acts.end(OBSERVED)
    return ("input_scale",) if static else ()


def _int8(group: Keys) -> tuple[Scheme, tuple[str, ...]]:
    weights = _weights(group, "int", 8)
    strategy = weights.one_of("strategy", "channel", "tensor")
    weights.one_of("symmetric", True)
    weights.one_of("group_size", None)
    weights.end(OBSERVED)
    acts = _arguments(group, "input_activations", "int", 8)
    acts.one_of("dynamic", True)
    acts.one_of("strategy", "token")
    acts.one_of("symmetric", True)
    acts.end(OBSERVED)
    return Int8Scheme(_GRANULARITY[strategy]), ()


def _packed(group: Keys) -> tuple[Scheme, tuple[str, ...]]:
    weights = _weights(group, "int", 4, 8)
    channel = weights.one_of("strategy", "group", "channel") == "channel"
    scheme = GroupedScheme(
        bits=weights.any("num_bits"),
        group=None if channel else weights.one_of("group_size", *GROUPS),
        symmetric=weights.one_of("symmetric", True, False),
        act_order=weights.one_of("actorder", "group", "weight", "static", "dynamic", None)
        in ("group", "dynamic"),
        packing=Packing.COMPRESSED,
    )
    if channel:
        weights.one_of("group_size", None, -1)
    weights.end(OBSERVED)
    group.one_of("input_activations", None)
    return scheme, ()


def _mxfp4(group: Keys) -> tuple[Scheme, tuple[str, ...]]:
    for name in ("weights", "input_activations"):
        if name == "weights" or group.any(name) is not None:
            _fp4_arguments(group, name, "group", 32)
    return Fp4Scheme(Fp4Kind.MX), ()


def _nvfp4(group: Keys) -> tuple[Scheme, tuple[str, ...]]:
    _fp4_arguments(group, "weights", "tensor_group", 16)
    if group.any("input_activations") is None:
        return Fp4Scheme(Fp4Kind.NV), ()
    _fp4_arguments(group, "input_activations", "tensor_group", 16)
    return Fp4Scheme(Fp4Kind.NV), ("input_global_scale",)


def _fp4_arguments(group: Keys, name: str, strategy: str, size: int) -> None:
    """Check 4-bit weights or activations. Activations keep more bits here."""
    found = _arguments(group, name, "float", 4)
    found.one_of("strategy", strategy)
    found.one_of("group_size", size)
    found.one_of("symmetric", True)
    found.one_of("dynamic", *((False, None) if name == "weights" else (True, False, "local")))
    found.end(OBSERVED)


def _weights(group: Keys, kind: str, *bits: int) -> Keys:
    found = _arguments(group, "weights", kind, *bits)
    found.one_of("dynamic", False, None)
    return found


def _arguments(group: Keys, name: str, kind: str, *bits: int) -> Keys:
    found = group.inner(name)
    found.one_of("type", kind)
    found.one_of("num_bits", *bits)
    return found


_FORMS: dict[str, Callable[[Keys], tuple[Scheme, tuple[str, ...]]]] = {
    "float-quantized": _fp8,
    "int-quantized": _int8,
    "pack-quantized": _packed,
    "mxfp4-pack-quantized": _mxfp4,
    "nvfp4-pack-quantized": _nvfp4,
}
"""Reader of a group's scheme, and of the scales that are not applied, by format."""
