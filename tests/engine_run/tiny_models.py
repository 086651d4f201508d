"""Small random models of every family, saved as transformers saves them."""

from __future__ import annotations

import atexit
import shutil
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch

SHAPE = {
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": True}),
    "llama-untied-biased": (
        "Llama",
        {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
    ),
    "llama-linear": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}},
    ),
    "llama-dynamic": (
        "Llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
    ),
    "llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 16}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-yarn": ("Qwen2", {"rope_parameters": YARN}),
    "qwen3": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": False}),
    "phi3": ("Phi3", {"pad_token_id": 0}),
    "phi3-partial": (
        "Phi3",
        {
            "pad_token_id": 0,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.75},
        },
    ),
    "granite": (
        "Granite",
        {
            "attention_multiplier": 0.3,
            "embedding_multiplier": 1.7,
            "residual_multiplier": 0.6,
            "logits_scaling": 2.5,
            "attention_bias": True,
        },
    ),
    "olmo2": ("Olmo2", {"pad_token_id": 0}),
    "smollm3": ("SmolLM3", {"pad_token_id": 0, "no_rope_layers": [0, 1, 0]}),
    "glm": ("Glm", {"head_dim": 16, "pad_token_id": 0}),
    "glm4": ("Glm4", {"head_dim": 12, "pad_token_id": 0, "attention_bias": False}),
    "starcoder2": ("Starcoder2", {}),
}


WINDOW = 24
"""Keys of a window: more than a block of 16, and no multiple of it."""
SLIDING = {"use_sliding_window": True, "sliding_window": WINDOW}
WINDOWED: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral-window": ("Mistral", {"sliding_window": WINDOW, "head_dim": 16}),
    "qwen2-window": ("Qwen2", {**SLIDING, "max_window_layers": 1}),
    "qwen3-window": (
        "Qwen3",
        {
            **SLIDING,
            "head_dim": 16,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "phi3-window": ("Phi3", {"sliding_window": WINDOW, "pad_token_id": 0}),
    "olmo3": (
        "Olmo3",
        {
            "num_hidden_layers": 4,
            "sliding_window": WINDOW,
            "pad_token_id": 0,
            "rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_theta": 500.0}},
        },
    ),
    "smollm3-window": (
        "SmolLM3",
        {**SLIDING, "no_rope_layer_interval": 2, "num_hidden_layers": 4, "pad_token_id": 0},
    ),
    "cohere2": (
        "Cohere2",
        {
            "num_hidden_layers": 4,
            "sliding_window": WINDOW,
            "sliding_window_pattern": 2,
            "logit_scale": 0.4,
            "attention_bias": True,
        },
    ),
    "starcoder2-window": ("Starcoder2", {"sliding_window": WINDOW, "use_bias": False}),
}
"""Models of which some layers have a window."""
GEMMA3 = {
    "head_dim": 16,
    "sliding_window": WINDOW,
    "query_pre_attn_scalar": 12,
    "tie_word_embeddings": True,
    "num_hidden_layers": 5,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 20000.0, "factor": 4.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    },
}
GEMMAS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("Gemma3", {**GEMMA3, "sliding_window_pattern": 3}),
    "gemma3-last-full": (
        "Gemma3",
        {
            **GEMMA3,
            "layer_types": [*["sliding_attention"] * 2, *["full_attention"] * 3],
            "tie_word_embeddings": False,
            "attention_bias": True,
        },
    ),
}
"""Models of Gemma's family."""
QWEN3_5 = {
    "head_dim": 16,
    "num_hidden_layers": 5,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "full_attention_interval": 2,
}
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("Qwen3_5", QWEN3_5),
    "qwen3_5-last-full": (
        "Qwen3_5",
        {
            **QWEN3_5,
            "linear_conv_kernel_dim": 3,
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 3,
            "rope_parameters": {
                "rope_type": "linear",
                "rope_theta": 1000.0,
                "factor": 2.0,
                "partial_rotary_factor": 0.5,
            },
            "layer_types": [*["linear_attention"] * 3, *["full_attention"] * 2],
            "tie_word_embeddings": True,
        },
    ),
}
"""Models of which some layers keep a recurrent state."""
MLA = {
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "num_key_value_heads": 6,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "routed_scaling_factor": 1.7,
    "n_group": 4,
    "topk_group": 2,
}
MSCALED = {**YARN, "mscale": 0.7, "mscale_all_dim": 0.9}
LATENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek-v2-lite": ("DeepseekV2", {**MLA, "q_lora_rank": None, "rope_parameters": MSCALED}),
    "deepseek-v2-groups": (
        "DeepseekV2",
        {**MLA, "q_lora_rank": 20, "topk_method": "group_limited_greedy"},
    ),
    "deepseek-v3": ("DeepseekV3", {**MLA, "q_lora_rank": 20, "rope_parameters": MSCALED}),
    "deepseek-v3-dense": (
        "DeepseekV3",
        {**MLA, "first_k_dense_replace": 3, "tie_word_embeddings": True},
    ),
}
"""Models with multi-head latent attention."""
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "head_dim": 16}
MOES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-moe": (
        "Qwen3Moe",
        {**EXPERTS, "moe_intermediate_size": 40, "norm_topk_prob": True, "mlp_only_layers": [1]},
    ),
    "qwen3-moe-last-dense": (
        "Qwen3Moe",
        {**EXPERTS, "moe_intermediate_size": 40, "decoder_sparse_step": 2},
    ),
    "qwen2-moe": (
        "Qwen2Moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 56,
        },
    ),
    "mixtral": ("Mixtral", {**EXPERTS, "tie_word_embeddings": True}),
    "gpt-oss": (
        "GptOss",
        {
            **EXPERTS,
            "num_hidden_layers": 4,
            "sliding_window": WINDOW,
            "rope_parameters": {**YARN, "truncate": False},
        },
    ),
}
"""Models with a mixture of experts."""
_ALL = {**MODELS, **WINDOWED, **GEMMAS, **HYBRIDS, **LATENTS, **MOES}


WIDE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 64,
    "num_attention_heads": 4,
    "initializer_range": 0.1,
}
"""Heads as wide as the kernels of a GPU take them."""


def temporary_folder(prefix: str) -> Path:
    """A new folder that is gone when the process ends."""
    folder = Path(mkdtemp(prefix=prefix))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def class_of(name: str) -> Any:
    """Return the class of ``transformers``, which takes seconds to import: not while tests are
    collected."""
    import transformers

    return getattr(transformers, f"{_ALL[name][0]}ForCausalLM")


@cache
def folder_of(name: str, *, wide: bool = False) -> Path:
    """The saved model ``name``; made once a run. Biases and norms are random too."""
    import transformers

    family, differences = _ALL[name]
    torch.manual_seed(sum(name.encode()))
    settings = {**SHAPE, **differences, **(WIDE if wide else {})}
    kind = (
        f"{family}TextConfig" if hasattr(transformers, f"{family}TextConfig") else f"{family}Config"
    )
    config = getattr(transformers, kind)(**settings)
    model = class_of(name)(config)
    for parameter_name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, 1.0 if "norm" in parameter_name else 0.0, 0.2)
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer, 0.0, 0.2)
    folder = temporary_folder(f"tandem-{name}-")
    model.save_pretrained(folder, max_shard_size="100KB" if "untied" in name else "1GB")
    return folder


@cache
def judge_of(name: str, *, wide: bool = False, held: torch.dtype = torch.float32):
    """transformers' model of the same folder, in float32, over weights as ``held`` holds them."""
    folder = folder_of(name, wide=wide)
    return class_of(name).from_pretrained(folder, dtype=held).float().eval()


def judged(
    name: str, prompt: list[int], count: int, held: torch.dtype = torch.float32
) -> tuple[list[int], torch.Tensor]:
    """transformers' greedy tokens, and its logits [count, vocabulary] at each of them."""
    model, tokens, logits = judge_of(name, held=held), list(prompt), []
    with torch.inference_mode():
        for _ in range(count):
            logits.append(model(torch.tensor([tokens])).logits[0, -1])
            tokens.append(int(logits[-1].argmax()))
    return tokens[len(prompt) :], torch.stack(logits)
