"""Codes of groups by AutoAWQ, AutoGPTQ and GPTQModel: ``quant_method`` awq and gptq."""

from __future__ import annotations

from typing import Any

from tandem.engine.config.quantization.keys import Keys, kept_rules
from tandem.engine.config.quantization.schemes import (
    GroupedScheme,
    Packing,
    QuantFacts,
    Rule,
    within,
)

GROUPS = (32, 64, 128)
_SILENT = (
    *("tokenizer", "dataset", "damp_percent", "damp_auto_increment", "act_group_aware", "mse"),
    *("true_sequential", "static_groups", "meta", "backend", "model_seqlen", "quantizer"),
    *("block_name_to_quantize", "module_name_preceding_first_block", "batch_size"),
    *("pad_token_id", "max_input_length", "cache_block_outputs", "model_name_or_path"),
    *("model_file_base_name", "use_cuda_fp16", "use_exllama", "disable_exllama"),
    *("exllama_config", "do_fuse", "fuse_max_seq_len", "modules_to_fuse", "pack_impl"),
)
"""Keys of the calibration, and of other engines' kernels."""


def _group(keys: Keys) -> int | None:
    found = keys.one_of("group_size", *GROUPS, -1)
    return None if found == -1 else int(found)


def read_awq(keys: Keys) -> QuantFacts:
    """Return the form of AutoAWQ's version gemm."""
    keys.one_of("bits", 4)
    keys.one_of("zero_point", True)
    for name in ("version", "format"):
        value = keys.any(name)
        if value is not None and str(value).lower() != "gemm":
            raise keys.refused(name, "gemm")
    keys.one_of("desc_act", False, None)
    keys.one_of("lm_head", False, None)
    keys.one_of("modules_in_block_to_quantize", None)
    keys.any("sym")  # written by transformers next to zero_point, which decides
    rules = kept_rules(keys)
    scheme = GroupedScheme(4, _group(keys), False, False, Packing.AWQ)
    keys.end(_SILENT)
    return QuantFacts((*rules, Rule(".*", scheme)))


def read_gptq(keys: Keys) -> QuantFacts:
    """Return the form of AutoGPTQ and GPTQModel."""
    named = [keys.one_of(name, "gptq", "gptq_v2", None) for name in ("checkpoint_format", "format")]
    keys.one_of("lm_head", False, None)
    keys.one_of("pack_dtype", "int32", None)
    keys.one_of("is_marlin_format", False, None)
    scheme = GroupedScheme(
        bits=keys.one_of("bits", 4, 8),
        group=_group(keys),
        symmetric=keys.one_of("sym", True, False, None) is not False,
        act_order=keys.one_of("desc_act", True, False, None) is True,
        packing=Packing.GPTQ_V2 if "gptq_v2" in named else Packing.GPTQ,
    )
    rules = (*kept_rules(keys), *_dynamic(keys))
    only = _flat(keys.any("modules_in_block_to_quantize"))
    if not all(isinstance(each, str) for each in only):
        raise keys.refused("modules_in_block_to_quantize", "lists of names of layers")
    keys.end(_SILENT)
    patterns = [within(each) for each in only] or [".*"]
    return QuantFacts((*rules, *(Rule(each, scheme) for each in patterns)))


def _dynamic(keys: Keys) -> list[Rule]:
    """Return the rules of layers that GPTQModel's ``dynamic`` leaves plain; others are refused."""
    found = keys.any("dynamic") or {}
    if not isinstance(found, dict) or not all(str(each).startswith("-:") for each in found):
        raise keys.refused("dynamic", "patterns of layers that are left plain, which begin with -:")
    return [Rule(keys.pattern("dynamic", each[2:]), None) for each in found]


def _flat(found: Any) -> list[Any]:
    """Return the items of a list of lists."""
    if not isinstance(found, list):
        return [] if found is None else [found]
    return [item for each in found for item in _flat(each)]


def from_gptq_file(content: dict[str, Any]) -> dict[str, Any]:
    """Return the quantization_config that quantize_config.json of AutoGPTQ stands for."""
    return {"quant_method": "gptq", **content}


def from_awq_file(content: dict[str, Any]) -> dict[str, Any]:
    """Return the quantization_config that quant_config.json of AutoAWQ stands for."""
    names = {"w_bit": "bits", "q_group_size": "group_size"}
    return {"quant_method": "awq", **{names.get(key, key): v for key, v in content.items()}}
