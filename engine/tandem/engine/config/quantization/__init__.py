"""Form of a model's linear weights, read from its config.json or the file of a tool next to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tandem.engine.config.quantization.awq_gptq import (
    from_awq_file,
    from_gptq_file,
    read_awq,
    read_gptq,
)
from tandem.engine.config.quantization.compressed_tensors import read_compressed
from tandem.engine.config.quantization.fp8 import read_fbgemm, read_fp8
from tandem.engine.config.quantization.gguf import read_gguf
from tandem.engine.config.quantization.keys import FIELD, Keys
from tandem.engine.config.quantization.modelopt import from_file, read_modelopt
from tandem.engine.config.quantization.mxfp4 import read_mxfp4
from tandem.engine.config.quantization.schemes import (
    FP8_BLOCK,
    Fp4Kind,
    Fp4Scheme,
    Fp8Scheme,
    GgufScheme,
    Granularity,
    GroupedScheme,
    Int8Scheme,
    Packing,
    QuantFacts,
    Rule,
    Scheme,
)
from tandem.engine.config.weight_files import read_json

__all__ = [
    "FP8_BLOCK",
    "Fp4Kind",
    "Fp4Scheme",
    "Fp8Scheme",
    "GgufScheme",
    "Granularity",
    "GroupedScheme",
    "Int8Scheme",
    "Packing",
    "QuantFacts",
    "Rule",
    "Scheme",
    "quantization_of",
    "with_tool_file",
]

_READERS: Mapping[str, Callable[[Keys], QuantFacts]] = {
    "fp8": read_fp8,
    "fbgemm_fp8": read_fbgemm,
    "compressed-tensors": read_compressed,
    "awq": read_awq,
    "gptq": read_gptq,
    "modelopt": read_modelopt,
    "gguf": read_gguf,
    "mxfp4": read_mxfp4,
}
_FILES: Mapping[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "hf_quant_config.json": from_file,
    "quantize_config.json": from_gptq_file,
    "quant_config.json": from_awq_file,
}
"""Tools' own files next to config.json: ModelOpt, AutoGPTQ, AutoAWQ."""
_EXCLUDED = {"compressed-tensors": "ignore", "modelopt": "exclude_modules"}
"""Key of the excluded layers, of methods that otherwise include the head."""
_HEAD = "lm_head"
_NAMES = ("quantization_config", "compression_config")
_NEAREST = (
    "; the nearest is the same model in bfloat16, in one of these forms, or as a GGUF file, whose"
    " weights are converted"
)


class ToolFile(dict[str, Any]):
    """A quantization_config that stands for a tool's own file."""

    name: str


def quantization_of(config: Mapping[str, Any]) -> QuantFacts | None:
    """Return the form of a parsed config.json's weights; None is plain. Raises InvalidParameter."""
    found = _stated(config)
    if found is None:
        return None
    keys = Keys(found, found.name if isinstance(found, ToolFile) else FIELD)
    method = keys.any("quant_method")
    reader = _READERS.get(method) if isinstance(method, str) else None
    if reader is None:
        raise keys.refused("quant_method", f"one of {', '.join(_READERS)}{_NEAREST}")
    facts = reader(keys)
    excluded = _EXCLUDED.get(method)
    if excluded is not None and _has_head(config) and facts.scheme(_HEAD) is not None:
        raise keys.refused(excluded, f"a list with {_HEAD}: the head must be plain")
    return facts


def with_tool_file(config: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
    """Return ``config`` with the quantization_config of a tool's own file, if it has none."""
    if _stated(config) is not None:
        return config
    for name, read in _FILES.items():
        if (folder / name).is_file():
            found = ToolFile(read(read_json(folder / name, needed=True)))
            found.name = name
            return {**config, _NAMES[0]: found}
    return config


def _stated(config: Mapping[str, Any]) -> Any:
    return next((config[name] for name in _NAMES if config.get(name) is not None), None)


def _has_head(config: Mapping[str, Any]) -> bool:
    """Return whether the model has a head of its own."""
    generates = str((config.get("architectures") or [""])[0]).endswith("ForCausalLM")
    return generates and not config.get("tie_word_embeddings")
