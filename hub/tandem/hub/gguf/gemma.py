"""Settings of Gemma 3 that a GGUF file leaves to llama.cpp, as config.json has them."""

from collections.abc import Mapping
from typing import Any

FAMILY = "gemma3"
WINDOW, PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"
LOCAL_BASE = "rope.freq_base_swa"
FOLLOWED = frozenset({PATTERN, LOCAL_BASE})
"""Keys with the family's prefix that other families do not have."""
DEFAULT_PATTERN = 6
"""Layers from one with full attention to the next."""
DEFAULT_LOCAL_BASE = 10_000.0
"""Base of the rotary embedding of layers with a window."""
NORM_OFFSET = 1.0
"""Part of a stored norm weight that transformers adds when it computes."""
_LAYERS_OF_27B = 62
_ACTIVATION = "gelu_pytorch_tanh"


def gemma3_keys(
    *, window: int, pattern: int, local_base: float, rope: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the keys for windows, both rotary embeddings and the activation.

    ``rope`` is the rotary embedding of layers with full attention.
    """
    local = {"rope_type": "default", "rope_theta": local_base}
    return {
        "model_type": "gemma3_text",
        "hidden_act": _ACTIVATION,
        "hidden_activation": _ACTIVATION,
        "sliding_window": window,
        "sliding_window_pattern": pattern,
        "rope_local_base_freq": local_base,
        "rope_parameters": {"full_attention": dict(rope), "sliding_attention": local},
    }


def query_scalar(*, layers: int, hidden: int, heads: int, head_dim: int) -> int:
    """Return query_pre_attn_scalar. The 27B model's differs from the head size (llama.cpp)."""
    return hidden // heads if layers == _LAYERS_OF_27B else head_dim
