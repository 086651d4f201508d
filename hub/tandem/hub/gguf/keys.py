"""Which keys of a GGUF file are followed, say nothing of the numbers, or are refused by name.

A key that is passed over may change every value that the model computes. So each key under the
family's prefix and under ``tokenizer.`` is in a table here, or the file is refused.
"""

from collections.abc import Callable, Mapping
from typing import Any

from tandem.hub.gguf.reader import GgufModel

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
"""Under the family's prefix; ``config`` and ``pooling`` read them."""
_SILENT = frozenset({"rope.scaling.finetuned", "tensor_data_layout"})
"""Under the family's prefix: they say where a model comes from."""
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
"""Under the family's prefix: values by which a key changes nothing."""
_TOKENIZER_FOLLOWED = frozenset(
    {
        *("tokenizer.chat_template", "tokenizer.ggml.model", "tokenizer.ggml.pre"),
        *("tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.ggml.merges"),
        *("tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_eos_token"),
    }
)
_TOKENIZER_SILENT = frozenset(
    {
        "tokenizer.chat_templates",
        "tokenizer.ggml.scores",  # of each merge's rank, in a vocabulary without merges
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
"""Flags that are not followed: only false is taken."""


def check_keys(model: GgufModel) -> None:
    """Raise UnsupportedModel for a key that may change what the model computes and is not read.

    Keys of other prefixes say what a file is, or how it was made.
    """
    if (kind := model.get("general.type", "model")) != "model":
        raise model.refusal("general.type", kind, "'model'")
    prefix = f"{model.architecture}."
    neutral: dict[str, Callable[[], tuple[Any, ...]]] = {
        "attention.scale": lambda: (0, head_dim_of(model) ** -0.5),
        "attention.value_length": lambda: (head_dim_of(model),),
        "rope.dimension_count": lambda: (head_dim_of(model),),
    }
    for key, value in model.keys.items():
        name = key.removeprefix(prefix)
        if key.startswith(prefix) and name not in _FOLLOWED and name not in _SILENT:
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
        return  # one of several templates, by its name
    if key not in _TOKENIZER_OFF:
        raise model.refusal(key, value, "a file without this key")
    if value is not False:
        raise model.refusal(key, value, "false")


def _is_one_of(value: object, allowed: tuple[Any, ...]) -> bool:
    if not isinstance(value, int | float):
        return False
    return any(abs(value - each) <= 1e-6 * max(1.0, abs(each)) for each in allowed)
