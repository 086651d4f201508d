"""GGUF metadata → config.json and generation_config.json.

The families are llama (also Mistral), qwen2, qwen3 and gemma3. Rope is written for transformers 4
and 5.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tandem.hub.errors import UnsupportedModel
from tandem.hub.gguf import gemma
from tandem.hub.gguf.reader import GgufModel, GgufTensor
from tandem.hub.gguf.token_types import TokenType

_FOLLOWED = frozenset(
    {
        *("block_count", "context_length", "embedding_length", "feed_forward_length"),
        *("attention.head_count", "attention.head_count_kv", "attention.key_length"),
        *("attention.layer_norm_rms_epsilon", "attention.sliding_window"),
        *("rope.freq_base", "rope.scaling.type", "rope.scaling.factor"),
        *("rope.scaling.original_context_length", "rope.scaling.attn_factor"),
        *("rope.scaling.yarn_attn_factor", "rope.scaling.yarn_beta_fast"),
        *("rope.scaling.yarn_beta_slow", "pooling_type", "vocab_size"),
    }
)
"""Keys with the family's prefix that are read."""
_SILENT = frozenset({"rope.scaling.finetuned", "tensor_data_layout"})
"""Keys with the family's prefix that have no effect."""
_NEUTRAL: Mapping[str, tuple[float, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.scale": (0,),
    "attention.temperature_scale": (0,),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "final_logit_softcapping": (0,),
    "leading_dense_block_count": (0,),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "rope.scale_linear": (0, 1),
    "rope.scaling.yarn_ext_factor": (-1, 1),
    "rope.scaling.yarn_log_multiplier": (0,),
    "use_parallel_residual": (False,),
}
"""Values with which a key has no effect."""
_TOKENIZER_FOLLOWED = frozenset(
    {
        *("tokenizer.chat_template", "tokenizer.ggml.model", "tokenizer.ggml.pre"),
        *("tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.ggml.merges"),
        "tokenizer.ggml.scores",
        *("tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_eos_token"),
    }
)
_TOKENIZER_SILENT = frozenset(
    {
        "tokenizer.chat_templates",
        "tokenizer.ggml.token_type_count",
        "tokenizer.huggingface.json",
    }
)
_TOKENIZER_OFF = frozenset(
    {
        *("tokenizer.ggml.add_sep_token", "tokenizer.ggml.add_space_prefix"),
        *("tokenizer.ggml.escape_whitespaces", "tokenizer.ggml.normalizer.lowercase"),
        "tokenizer.ggml.remove_extra_whitespaces",
    }
)
"""Flags that must be false."""


def check_keys(model: GgufModel) -> None:
    """Raise UnsupportedModel for an unread key that may change the results of the model."""
    if (kind := model.get("general.type", "model")) != "model":
        raise model.refusal("general.type", kind, "'model'")
    prefix = f"{model.architecture}."
    read = _FOLLOWED | (gemma.FOLLOWED if model.architecture == gemma.FAMILY else set())
    neutral: dict[str, Callable[[], tuple[Any, ...]]] = {
        "attention.scale": lambda: (0, head_dim_of(model) ** -0.5),
        "attention.value_length": lambda: (head_dim_of(model),),
        "rope.dimension_count": lambda: (head_dim_of(model),),
    }
    for key, value in model.keys.items():
        name = key.removeprefix(prefix)
        if key.startswith(prefix) and name not in read and name not in _SILENT:
            allowed = neutral[name]() if name in neutral else _NEUTRAL.get(name, ())
            if not _is_one_of(value, allowed):
                words = " or ".join(map(repr, allowed)) or "a file without this key"
                raise model.refusal(key, value, words)
        elif key.startswith("tokenizer."):
            _check_tokenizer_key(model, key, value)


def head_dim_of(model: GgufModel) -> int:
    """Return how wide a head is."""
    if model.get(model.own("attention.key_length")) is not None:
        return model.integer(model.own("attention.key_length"))
    heads = model.integer(model.own("attention.head_count"))
    hidden = model.integer(model.own("embedding_length"))
    if hidden % heads:
        allowed = f"a multiple of the {heads} heads"
        raise model.refusal(model.own("embedding_length"), hidden, allowed)
    return hidden // heads


def _check_tokenizer_key(model: GgufModel, key: str, value: object) -> None:
    if key in _TOKENIZER_FOLLOWED or key in _TOKENIZER_SILENT or key.endswith("_token_id"):
        return
    if key.startswith("tokenizer.chat_template."):
        return  # one of several templates
    if key not in _TOKENIZER_OFF:
        raise model.refusal(key, value, "a file without this key")
    if value is not False:
        raise model.refusal(key, value, "false")


def _is_one_of(value: object, allowed: tuple[Any, ...]) -> bool:
    if not isinstance(value, int | float):
        return False
    return any(abs(value - each) <= 1e-6 * max(1.0, abs(each)) for each in allowed)


ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    gemma.FAMILY: "Gemma3ForCausalLM",
}
"""Convertible families, and transformers' class of each."""

MAX_LAYERS = 1_024
_ENDS = ("eos", "eot", "eom")
_END_TEXTS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|EOT|>",
    "<end_of_turn>",
    "<｜end▁of▁sentence｜>",
)
"""Names of control tokens that end a turn or a text; a file names only one of them."""
_BETWEEN_TEXTS = "<|endoftext|>"
"""Text that also ends an answer if it is the file's begin or pad token.

Qwen's files need it; SmolLM2's own generation_config.json does not end there.
"""

_LLAMA3_FACTORS = (8.0, 32.0, 16.0, 4.0)
_LLAMA3_TRAINED = 8192


def model_config(model: GgufModel, tensors: Mapping[str, GgufTensor], dtype: str) -> dict[str, Any]:
    """Return the content of config.json. Raises UnsupportedModel."""
    family = model.architecture
    if family not in ARCHITECTURES:
        raise UnsupportedModel(
            f"model: {model.path.name} has architecture {family!r}; GGUF can be converted for "
            f"{sorted(ARCHITECTURES)}"
        )
    check_keys(model)
    own = model.own
    heads = model.integer(own("attention.head_count"))
    kv_heads = model.integer(own("attention.head_count_kv"), default=heads, most=heads)
    if heads % kv_heads:
        key = own("attention.head_count_kv")
        raise model.refusal(key, kv_heads, f"a divisor of the {heads} heads")
    head_dim = head_dim_of(model)
    rope = _rope(model, tensors, head_dim)
    config = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "dtype": dtype,
        "vocab_size": _vocab_size(model, tensors),
        "hidden_size": model.integer(own("embedding_length")),
        "intermediate_size": model.integer(own("feed_forward_length")),
        "num_hidden_layers": model.integer(own("block_count"), most=MAX_LAYERS),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": model.integer(own("context_length")),
        "rms_norm_eps": model.number(own("attention.layer_norm_rms_epsilon")),
        "rope_theta": rope["rope_theta"],
        "rope_parameters": rope,
        "tie_word_embeddings": "output.weight" not in tensors,
        **_token_ids(model),
    }
    if family == gemma.FAMILY:
        return config | _gemma3_keys(model, tensors, config)
    return config | _family_keys(model, tensors)


def _gemma3_keys(
    model: GgufModel, tensors: Mapping[str, GgufTensor], config: Mapping[str, Any]
) -> dict[str, Any]:
    keys = gemma.gemma3_keys(
        window=model.integer(model.own(gemma.WINDOW)),
        pattern=model.integer(model.own(gemma.PATTERN), default=gemma.DEFAULT_PATTERN),
        local_base=model.number(model.own(gemma.LOCAL_BASE), default=gemma.DEFAULT_LOCAL_BASE),
        rope=config["rope_parameters"],
    )
    scalar = gemma.query_scalar(
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        heads=config["num_attention_heads"],
        head_dim=config["head_dim"],
    )
    biased = "blk.0.attn_q.bias" in tensors
    return {**keys, "query_pre_attn_scalar": scalar, "attention_bias": biased}


def _vocab_size(model: GgufModel, tensors: Mapping[str, GgufTensor]) -> int:
    table = tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise UnsupportedModel(f"model: {model.path.name} lacks a matrix token_embd.weight")
    rows, count = table.shape[0], len(model.texts("tokenizer.ggml.tokens"))
    if not 1 <= count <= rows:
        raise model.refusal("tokenizer.ggml.tokens of length", count, f"1 to {rows}")
    if model.integer(key := model.own("vocab_size"), default=rows) != rows:
        raise model.refusal(key, model.get(key), f"{rows}, the rows of token_embd.weight,")
    return rows


def generation_config(model: GgufModel) -> dict[str, Any]:
    """Return the content of generation_config.json."""
    ids = _token_ids(model)
    count = len(model.texts("tokenizer.ggml.tokens"))
    named = [model.token_id(key, count) for key in _ENDS]
    known = [end for end in named if end is not None]
    stops = list(dict.fromkeys([*known, *_called_ends(model, ids)]))
    if stops:
        ids["eos_token_id"] = stops[0] if len(stops) == 1 else stops
    return ids


def _called_ends(model: GgufModel, ids: Mapping[str, Any]) -> list[int]:
    used = (ids.get("bos_token_id"), ids.get("pad_token_id"))
    tokens = model.texts("tokenizer.ggml.tokens")
    kinds = model.get("tokenizer.ggml.token_type") or []
    return [
        at
        for at, (text, kind) in enumerate(zip(tokens, kinds, strict=False))
        if kind == TokenType.CONTROL
        and (text in _END_TEXTS or (text == _BETWEEN_TEXTS and at in used))
    ]


def _token_ids(model: GgufModel) -> dict[str, Any]:
    keys = {"bos": "bos", "eos": "eos", "pad": "padding"}
    count = len(model.texts("tokenizer.ggml.tokens"))
    found = {name: model.token_id(key, count) for name, key in keys.items()}
    return {f"{name}_token_id": value for name, value in found.items() if value is not None}


def _family_keys(model: GgufModel, tensors: Mapping[str, GgufTensor]) -> dict[str, Any]:
    key = model.own("attention.sliding_window")
    window = model.integer(key, least=0, default=0)
    if window and model.architecture != "llama":
        length = model.integer(model.own("context_length"))
        if window < length:
            raise model.refusal(key, window, f"0, or the context of {length} tokens,")
    biased = "blk.0.attn_q.bias" in tensors
    if model.architecture == "qwen2":
        return {"use_sliding_window": False}
    if model.architecture == "qwen3":
        return {"use_sliding_window": False, "attention_bias": biased}
    if window:
        return {
            "architectures": ["MistralForCausalLM"],
            "model_type": "mistral",
            "sliding_window": window,
        }
    return {"attention_bias": biased, "mlp_bias": "blk.0.ffn_gate.bias" in tensors}


def _rope(model: GgufModel, tensors: Mapping[str, GgufTensor], head_dim: int) -> dict[str, Any]:
    rope: dict[str, Any] = {
        "rope_theta": model.number(model.own("rope.freq_base"), default=10000.0)
    }
    kind = model.text(model.own("rope.scaling.type"), default="none")
    if kind not in ("none", "linear", "yarn"):
        raise UnsupportedModel(
            f"model: {model.path.name} has rope.scaling.type {kind!r}; 'none', 'linear' and 'yarn' "
            f"are allowed"
        )
    if "rope_freqs.weight" in tensors:
        if kind != "none":
            allowed = "'none' next to rope_freqs.weight"
            raise model.refusal(model.own("rope.scaling.type"), kind, allowed)
        return rope | _llama3(model, tensors["rope_freqs.weight"], rope["rope_theta"], head_dim)
    if kind == "none":
        return rope | {"rope_type": "default"}
    factor = model.number(model.own("rope.scaling.factor"))
    rope |= {"rope_type": kind, "factor": factor}
    original = model.own("rope.scaling.original_context_length")
    if model.get(original):
        rope["original_max_position_embeddings"] = model.integer(original)
    return rope | (_yarn(model, factor) if kind == "yarn" else {})


def _yarn(model: GgufModel, factor: float) -> dict[str, Any]:
    """Return the yarn settings of a file except its factor.

    A file's attention factor is a multiple of the default for ``factor``; transformers' replaces
    it.
    """
    found: dict[str, Any] = {}
    for name in ("beta_fast", "beta_slow"):
        key = model.own(f"rope.scaling.yarn_{name}")
        if model.get(key) is not None:
            found[name] = model.number(key)
    for name in ("attn_factor", "yarn_attn_factor"):
        times = model.number(model.own(f"rope.scaling.{name}"), default=1.0)
        if times != 1.0:
            found["attention_factor"] = times * (0.1 * math.log(max(factor, 1.0)) + 1.0)
    return found


def _llama3(model: GgufModel, stored: GgufTensor, theta: float, head_dim: int) -> dict[str, Any]:
    """Return the settings of a file's per-frequency factors, by trying published ones."""
    if stored.shape != (head_dim // 2,):
        allowed = f"({head_dim // 2},)"
        raise model.refusal("rope_freqs.weight of shape", stored.shape, allowed)
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
    """Return Llama 3.1's divisor of each rotary frequency, from 1 to ``factor``."""
    waves = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((_LLAMA3_TRAINED / waves - 1.0) / 3.0, 0.0, 1.0)
    blended: npt.NDArray[np.float64] = 1.0 / ((1.0 - smooth) / factor + smooth)
    return blended
