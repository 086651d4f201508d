"""Reads and checks config.json and generation_config.json, also in the spelling before transformers
5."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tandem.engine.config.facts import ModelFacts
from tandem.engine.config.families import family_of
from tandem.engine.config.families.values import number, positive
from tandem.engine.config.pooling import (
    max_length_of,
    of_encoder,
    pooling_of,
    with_modules,
)
from tandem.engine.config.quantization import quantization_of, with_tool_file
from tandem.engine.config.weight_files import Stored, read_json, stored_in
from tandem.protocol.errors import InvalidParameter

_FOLLOWED = frozenset(
    {
        *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings"),
        *("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"),
        *("tie_word_embeddings", "rms_norm_eps", "layer_norm_eps", "attention_bias", "mlp_bias"),
        *("hidden_act", "sliding_window", "use_sliding_window", "max_window_layers"),
        *("position_embedding_type", "is_decoder", "add_cross_attention", "is_causal"),
        *("quantization_config", "compression_config", "num_labels", "id2label", "problem_type"),
        *("type_vocab_size", "matryoshka_dimensions", "dtype", "torch_dtype"),
        *("dim", "colbert_dim", "projection_dim", "layer_types"),
    }
)
_SILENT = frozenset(
    {
        *("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "embd_pdrop"),
        *("classifier_dropout", "hidden_dropout", "hidden_dropout_prob", "resid_pdrop"),
        *("embedding_dropout", "attn_implementation", "_attn_implementation"),
        *("_attn_implementation_autoset", "output_attentions", "output_router_logits"),
        *("encoder_no_repeat_ngram_size", "chunk_size_feed_forward", "pruned_heads"),
        *("initializer_range", "initializer_factor", "embedding_initializer_range"),
        *("pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers"),
        *("pooler_size_per_head", "pooler_type", "pretraining_tp", "router_aux_loss_coef"),
        *("router_jitter_noise", "router_z_loss_coef", "aux_loss_alpha", "seq_aux"),
        *("diversity_penalty", "length_penalty", "repetition_penalty", "typical_p"),
        *("original_max_position_embeddings", "sbert_ce_default_activation_function"),
        *("rope_interleaved", "head_type", "cross_attention_hidden_size"),
        *("tie_encoder_decoder", "remove_invalid_values", "renormalize_logits"),
        *("use_flash_attn", "use_flash_attention", "use_flash_attention_2", "use_memory_efficient"),
    }
)
"""Keys without effect on the computation from given weights."""
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "attention_multiplier": (),
    "embedding_multiplier": (1,),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "mlp_multiplier": (1,),
    "residual_multiplier": (1,),
    "rope_ratio": (1,),
    "scale_depth": (),
    "scale_emb": (1,),
    "num_experts_per_tok": (1,),
    "qkv_bias": (True,),
    "norm_type": ("rms_norm", "rmsnorm", "layer_norm"),
    "attention_type": ("full", "full_attention", "gqa", "original_full"),
}
"""Further values by which a key changes nothing."""
_OFF: tuple[Any, ...] = (None, False, 0, "", [], {})
_PARTS = re.compile(
    r"attn|attention|rope|rotary|alibi|softcap|multiplier|scal|clip|clamp|norm|logit|embed|resid"
    r"|window|chunk|sparse|expert|moe|router|mlp|ffn|glu|bias|head|layer|kernel|conv|ssm|mamba"
    r"|gate|mup|temperature_tuning|adapter|quant|parallel|interleav|mtp|nextn"
    r"|topk|n_group|routed|scoring|dense_replace"
)
"""Words of parts of the computation."""


def check_keys(config: Mapping[str, Any], own: Collection[str] = ()) -> None:
    """Raise InvalidParameter for an unread key that changes the results of the model.

    ``own`` are keys of the model's family.
    """
    for key, value in config.items():
        if (
            key in _FOLLOWED
            or key in own
            or key in _SILENT
            or any(_same(value, each) for each in _OFF)
        ):
            continue
        neutral = _NEUTRAL.get(key)
        if neutral is None and _PARTS.search(key) is None:
            continue
        if not any(_same(value, each) for each in neutral or ()):
            words = " or ".join(str(each) for each in neutral or ()) or "leave it out"
            allowed = f"{words}: it changes what the model computes, and is not computed here"
            raise InvalidParameter(f"config.json: {key}", value, allowed)


def _same(value: Any, other: Any) -> bool:
    """Return whether two values are equal; 1 is 1.0, and true is not 1."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other


HEAD = "lm_head.weight"
_EMBEDDINGS = ("model.embed_tokens.weight", "embed_tokens.weight")
_SAMPLES = 64
_SAMPLE_BYTES = 4096


def check_tied(folder: Path) -> None:
    """Raise InvalidParameter if a folder with a tied head has weights of another head.

    Compares evenly spaced pieces. The loader reports unreadable weights.
    """
    head = stored_in(folder, HEAD)
    found = (stored_in(folder, name) for name in _EMBEDDINGS)
    table = next((each for each in found if each is not None), None)
    if head is None or table is None:
        return
    try:
        equal = head.shape == table.shape and (head.dtype != table.dtype or _alike(head, table))
    except OSError:
        return
    if not equal:
        allowed = f"false: {HEAD} differs from the embeddings"
        raise InvalidParameter("config.json: tie_word_embeddings", True, allowed)


def _alike(one: Stored, other: Stored) -> bool:
    step = max(1, one.size // _SAMPLES)
    with one.path.open("rb") as first, other.path.open("rb") as second:
        for at in range(0, one.size, step):
            first.seek(one.start + at)
            second.seek(other.start + at)
            length = min(_SAMPLE_BYTES, one.size - at)
            if first.read(length) != second.read(length):
                return False
    return True


CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"


def read_facts(folder: str | Path) -> ModelFacts:
    """Return the facts of the model in ``folder``. Raises InvalidParameter that names the key."""
    path = Path(folder)
    config: Mapping[str, Any] = read_json(path / CONFIG, needed=True)
    family = family_of(_architecture(config))
    config = with_tool_file(family.completed(config, path), path)
    check_keys(config, family.keys)
    facts = facts_of(config, read_json(path / GENERATION_CONFIG, needed=False))
    tied, vocab_size = facts.tie_word_embeddings, facts.vocab_size
    if tied and facts.encoder is None:
        check_tied(path)
    pooling = with_modules(facts.pooling, path, tied=tied, vocab_size=vocab_size)
    return replace(facts, pooling=pooling, text_length=max_length_of(path))


def facts_of(config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelFacts:
    """Return the facts of a parsed config.json and generation_config.json."""
    architecture = _architecture(config)
    family = family_of(architecture)
    config = {**config, **_absent(config, family.defaults)}
    num_heads = positive(config, "num_attention_heads")
    hidden_size = positive(config, "hidden_size")
    bias = bool(config.get("attention_bias", False))
    values: dict[str, Any] = {
        "architecture": architecture,
        "num_layers": positive(config, "num_hidden_layers"),
        "hidden_size": hidden_size,
        "intermediate_size": positive(config, "intermediate_size"),
        "num_heads": num_heads,
        "num_kv_heads": _kv_heads(config, num_heads),
        "head_dim": _head_dim(config, hidden_size, num_heads),
        "vocab_size": positive(config, "vocab_size"),
        "max_position_embeddings": positive(config, "max_position_embeddings"),
        "rope": family.rope(config),
        "tie_word_embeddings": bool(config.get("tie_word_embeddings", False)),
        "rms_norm_eps": number("rms_norm_eps", config.get("rms_norm_eps", 1e-6)),
        "attention_bias": bias,
        "attention_output_bias": bias,
        "mlp_bias": bool(config.get("mlp_bias", False)),
        "hidden_act": str(config.get("hidden_act", "silu")),
        "layer_kinds": family.stated_kinds(config),
        "eos_token_ids": _eos(config, generation or {}),
        "dtype": _dtype(config),
        "quantization": quantization_of(config),
        "pooling": pooling_of(config, architecture),
    }
    facts = ModelFacts(**{**values, **family.facts(config)})
    if facts.encoder is None:
        _check_causal(config)
        return facts
    return replace(facts, pooling=of_encoder(facts.pooling, facts.encoder))


def _absent(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in defaults.items() if config.get(name) is None}


def _check_causal(config: Mapping[str, Any]) -> None:
    if config.get("is_causal") is False:
        allowed = "true: tokens of this architecture see earlier ones alone"
        raise InvalidParameter(f"{CONFIG}: is_causal", False, allowed)


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise InvalidParameter(f"{CONFIG}: architectures", names, "a list with a class name")
    return names[0]


def _kv_heads(config: Mapping[str, Any], num_heads: int) -> int:
    if config.get("num_key_value_heads") is None:
        return num_heads
    count = positive(config, "num_key_value_heads")
    if num_heads % count:
        raise InvalidParameter(
            f"{CONFIG}: num_key_value_heads", count, f"a divisor of the {num_heads} heads"
        )
    return count


def _head_dim(config: Mapping[str, Any], hidden_size: int, num_heads: int) -> int:
    if config.get("head_dim") is not None:
        return positive(config, "head_dim")
    if hidden_size % num_heads:
        raise InvalidParameter(
            f"{CONFIG}: hidden_size", hidden_size, f"a multiple of the {num_heads} heads"
        )
    return hidden_size // num_heads


def _eos(config: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    for source in (generation, config):
        value = source.get("eos_token_id")
        if isinstance(value, int):
            return (value,)
        if isinstance(value, list) and value:
            return tuple(value)
    return ()


def _dtype(config: Mapping[str, Any]) -> str | None:
    value = config.get("dtype", config.get("torch_dtype"))
    return value.removeprefix("torch.") if isinstance(value, str) else None
