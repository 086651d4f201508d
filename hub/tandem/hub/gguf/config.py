"""GGUF metadata → config.json and generation_config.json.

Three families: llama (which Mistral's files also are), qwen2 and qwen3. The keys are transformers'
(release 5 reads ``rope_parameters``, release 4 and other servers ``rope_theta``: both are written).
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tandem.hub.errors import UnsupportedModel
from tandem.hub.gguf.reader import GgufModel, GgufTensor
from tandem.hub.gguf.tokenizer import TokenType

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""Families that can be converted, and transformers' class for each."""

_ENDS = ("eos", "eot", "eom")
_END_TEXTS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|EOT|>",
    "<｜end▁of▁sentence｜>",
)
"""Control tokens that end a turn or a text by what they are called: a file's keys name one end,
where the model's own generation_config.json often has two or three."""
_BETWEEN_TEXTS = "<|endoftext|>"
"""An end, too, where the file has it begin or pad texts, as Qwen's do. SmolLM2's have it for
neither, and its own generation_config.json does not end there: nor does this one, so that answers
are those of transformers."""

_LLAMA3_FACTORS = (8.0, 32.0, 16.0, 4.0)
_LLAMA3_TRAINED = 8192


def model_config(model: GgufModel, tensors: Mapping[str, GgufTensor], dtype: str) -> dict[str, Any]:
    """The content of config.json. Raises UnsupportedModel for another family or rotary scaling."""
    family = model.architecture
    if family not in ARCHITECTURES:
        raise UnsupportedModel(
            f"model: {model.path.name} has architecture {family!r}; GGUF can be converted for "
            f"{sorted(ARCHITECTURES)}"
        )
    heads = int(model.require_own("attention.head_count"))
    hidden = int(model.require_own("embedding_length"))
    head_dim = int(model.own("attention.key_length") or model.own("rope.dimension_count") or 0)
    rope = _rope(model, tensors, head_dim or hidden // heads)
    config = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "dtype": dtype,
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": int(model.require_own("feed_forward_length")),
        "num_hidden_layers": int(model.require_own("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(model.own("attention.head_count_kv", heads)),
        "head_dim": head_dim or hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": int(model.require_own("context_length")),
        "rms_norm_eps": float(model.require_own("attention.layer_norm_rms_epsilon")),
        "rope_theta": rope["rope_theta"],
        "rope_parameters": rope,
        "tie_word_embeddings": "output.weight" not in tensors,
        **_token_ids(model),
    }
    return config | _family_keys(model, tensors)


def generation_config(model: GgufModel) -> dict[str, Any]:
    """The content of generation_config.json: which tokens begin, end and pad."""
    ids = _token_ids(model)
    named = [model.get(f"tokenizer.ggml.{key}_token_id") for key in _ENDS]
    known = [int(end) for end in named if end is not None]
    stops = list(dict.fromkeys([*known, *_called_ends(model, ids)]))
    if stops:
        ids["eos_token_id"] = stops[0] if len(stops) == 1 else stops
    return ids


def _called_ends(model: GgufModel, ids: Mapping[str, Any]) -> list[int]:
    used = (ids.get("bos_token_id"), ids.get("pad_token_id"))
    tokens: list[str] = model.get("tokenizer.ggml.tokens") or []
    kinds: list[int] = model.get("tokenizer.ggml.token_type") or []
    return [
        at
        for at, (text, kind) in enumerate(zip(tokens, kinds, strict=False))
        if kind == TokenType.CONTROL
        and (text in _END_TEXTS or (text == _BETWEEN_TEXTS and at in used))
    ]


def _token_ids(model: GgufModel) -> dict[str, Any]:
    keys = {"bos": "bos", "eos": "eos", "pad": "padding"}
    found = {name: model.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    return {f"{name}_token_id": int(value) for name, value in found.items() if value is not None}


def _family_keys(model: GgufModel, tensors: Mapping[str, GgufTensor]) -> dict[str, Any]:
    window = model.own("attention.sliding_window")
    biased = "blk.0.attn_q.bias" in tensors
    if model.architecture == "qwen2":
        return {"use_sliding_window": False}
    if model.architecture == "qwen3":
        return {"use_sliding_window": False, "attention_bias": biased}
    if window:
        return {
            "architectures": ["MistralForCausalLM"],
            "model_type": "mistral",
            "sliding_window": int(window),
        }
    return {"attention_bias": biased, "mlp_bias": "blk.0.ffn_gate.bias" in tensors}


def _rope(model: GgufModel, tensors: Mapping[str, GgufTensor], head_dim: int) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_theta": float(model.own("rope.freq_base", 10000.0))}
    if "rope_freqs.weight" in tensors:
        return rope | _llama3(model, tensors["rope_freqs.weight"], rope["rope_theta"], head_dim)
    kind = model.own("rope.scaling.type", "none")
    if kind == "none":
        return rope | {"rope_type": "default"}
    if kind not in ("linear", "yarn"):
        raise UnsupportedModel(
            f"model: {model.path.name} has rope.scaling.type {kind!r}; 'none', 'linear' and 'yarn' "
            f"are allowed"
        )
    rope |= {"rope_type": kind, "factor": float(model.require_own("rope.scaling.factor"))}
    if trained := model.own("rope.scaling.original_context_length"):
        rope["original_max_position_embeddings"] = int(trained)
    return rope


def _llama3(model: GgufModel, stored: GgufTensor, theta: float, head_dim: int) -> dict[str, Any]:
    """The settings behind a file's per-frequency factors, found by trying the published ones."""
    factors = stored.rows()
    for factor in _LLAMA3_FACTORS:
        if np.allclose(factors, _llama3_factors(theta, head_dim, factor), rtol=1e-4):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": _LLAMA3_TRAINED,
            }
    raise UnsupportedModel(
        f"model: {model.path.name} scales its rotary frequencies by factors that fit no llama3 "
        f"setting {_LLAMA3_FACTORS}"
    )


def _llama3_factors(theta: float, head_dim: int, factor: float) -> npt.NDArray[np.float64]:
    """What Llama 3.1 divides each rotary frequency by: 1 for short waves, ``factor`` for long."""
    waves = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((_LLAMA3_TRAINED / waves - 1.0) / 3.0, 0.0, 1.0)
    blended: npt.NDArray[np.float64] = 1.0 / ((1.0 - smooth) / factor + smooth)
    return blended
