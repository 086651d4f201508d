"""quantization_config of each form, as its tool writes it."""

from __future__ import annotations

from typing import Any

FP8_BLOCKS: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}


def compressed_config(form: str, weights: dict[str, Any], acts: Any = None) -> dict[str, Any]:
    """A quantization_config as llm-compressor writes it, with one group."""
    group = {
        "input_activations": acts,
        "output_activations": None,
        "targets": ["Linear"],
        "weights": {
            "actorder": None,
            "block_structure": None,
            "dynamic": False,
            "group_size": None,
            "observer": "minmax",
            "observer_kwargs": {},
            "symmetric": True,
            **weights,
        },
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "global_compression_ratio": 1.5,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.12.2",
    }


def acts(bits: int, kind: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": kind, "dynamic": True, "symmetric": True, **more}


def gptq_config(**more: Any) -> dict[str, Any]:
    return {
        "quant_method": "gptq",
        "checkpoint_format": "gptq",
        "damp_percent": 0.01,
        "lm_head": False,
        "true_sequential": True,
        "meta": {"quantizer": ["gptqmodel:2.0"]},
        **more,
    }


def packed_config(bits: int, group: int, symmetric: bool, **more: Any) -> dict[str, Any]:
    sizes = {"strategy": "channel"} if group == -1 else {"strategy": "group", "group_size": group}
    own = {"type": "int", "num_bits": bits, "symmetric": symmetric, **sizes, **more}
    return compressed_config("pack-quantized", own)


AWQ = {"quant_method": "awq", "version": "gemm", "bits": 4, "zero_point": True}
FP8_TOKEN = acts(8, "float", strategy="token")
FP8_STATIC = acts(8, "float", strategy="tensor") | {"dynamic": False}
FLOAT8 = {"type": "float", "num_bits": 8}
FLOAT4 = {"type": "float", "num_bits": 4}
INT8 = {"type": "int", "num_bits": 8}
