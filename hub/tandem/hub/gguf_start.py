"""Judges a GGUF file by its first bytes: which family it is of, and the shape of its model.

A file on a hub is judged before it is fetched, one on this disk before it is converted. Only keys
with one value are read; a key that is not within the bytes given counts as unknown.
"""

from __future__ import annotations

from typing import Any

from tandem.hub.errors import UnsupportedModel
from tandem.hub.gguf.values import MAX_KEYS, EndOfFile, Kind, Malformed, Values

START_BYTES = 1 << 20
"""Enough for the keys before a vocabulary, which writers put first."""
_TOKENS = "tokenizer.ggml.tokens"


def read_keys(start: bytes) -> dict[str, Any]:
    """Return the keys with one value that ``start`` holds, and of the vocabulary its length."""
    found: dict[str, Any] = {}
    try:
        values = Values(memoryview(start))
        values.number("Q")  # tensors
        for _ in range(values.count("keys", MAX_KEYS)):
            key, kind = values.text("a key"), values.number("I")
            if kind == Kind.ARRAY:
                inner, count = values.list_head(key)
                if key == _TOKENS:
                    found[key] = count
                values.skip_list(inner, count, key)
            else:
                found[key] = values.value(kind, key)
    except (EndOfFile, Malformed):
        pass  # the converter names what is wrong
    return found


def sketch(start: bytes, name: str, families: dict[str, str]) -> dict[str, Any] | None:
    """Return what config.json will say of the model, as far as it is known; None if too little is.

    ``families`` are the architectures that can be converted. Raises UnsupportedModel for others.
    """
    keys = read_keys(start)
    family = keys.get("general.architecture")
    if family is None:
        return None
    if family not in families:
        raise UnsupportedModel(
            f"model: {name} has architecture {family!r}; GGUF can be converted for "
            f"{sorted(families)}"
        )
    if keys.get(f"{family}.expert_count"):
        raise UnsupportedModel(
            f"model: {name} is a mixture of experts ({family}.expert_count is "
            f"{keys[f'{family}.expert_count']}), which cannot be computed yet; give a dense model"
        )
    parts = keys.get("split.count", 1)
    if isinstance(parts, int) and parts > 1:
        raise UnsupportedModel(
            f"model: {name} is one of {parts} parts; merge them first (llama-gguf-split --merge)"
        )
    try:
        return _config(keys, family, families[family])
    except (KeyError, TypeError, ZeroDivisionError):
        return None  # the converter names what is wrong


def _config(keys: dict[str, Any], family: str, architecture: str) -> dict[str, Any]:
    def own(key: str, *default: Any) -> Any:
        return keys.get(f"{family}.{key}", *default) if default else keys[f"{family}.{key}"]

    heads = own("attention.head_count")
    rope: dict[str, Any] = {"rope_theta": own("rope.freq_base", 10000.0), "rope_type": "default"}
    if (kind := own("rope.scaling.type", "none")) in ("linear", "yarn"):
        rope |= {"rope_type": kind, "factor": own("rope.scaling.factor")}
        if original := own("rope.scaling.original_context_length", None):
            rope["original_max_position_embeddings"] = original
    return {
        "architectures": [architecture],
        "vocab_size": keys.get(_TOKENS) or own("vocab_size"),
        "hidden_size": own("embedding_length"),
        "intermediate_size": own("feed_forward_length"),
        "num_hidden_layers": own("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": own("attention.head_count_kv", heads),
        "head_dim": own("attention.key_length", own("embedding_length") // heads),
        "max_position_embeddings": own("context_length"),
        "rope_parameters": rope,
    }
