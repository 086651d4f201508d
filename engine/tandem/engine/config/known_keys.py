"""Keys of config.json that change what a model computes: followed, neutral, or refused by name.

transformers' code of another version or another author may use a key that is not read here. If it
were ignored, every answer would change silently. Keys that are in no table pass only if their name
refers to no part of the computation, or their value switches nothing on.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

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
"""Values by which a key changes nothing, other than those that switch it off."""
_OFF: tuple[Any, ...] = (None, False, 0, "", [], {})
_PARTS = re.compile(
    r"attn|attention|rope|rotary|alibi|softcap|multiplier|scal|clip|clamp|norm|logit|embed|resid"
    r"|window|chunk|sparse|expert|moe|router|mlp|ffn|glu|bias|head|layer|kernel|conv|ssm|mamba"
    r"|gate|mup|temperature_tuning|adapter|quant|parallel|interleav|mtp|nextn"
)
"""Words of parts of the computation."""
_LAYERS = ("full_attention", "sliding_attention")


def check_keys(config: Mapping[str, Any], own: Collection[str] = ()) -> None:
    """Raise InvalidParameter for a key that changes what the model computes and is not read.

    ``own`` are keys that the model's family follows.
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
    _check_layers(config.get("layer_types"))


def _check_layers(kinds: Any) -> None:
    """Raise InvalidParameter unless every layer's kind is known. Layers with a window need no code:
    it bounds the model's context."""
    if kinds is None:
        return
    if not isinstance(kinds, list) or any(kind not in _LAYERS for kind in kinds):
        allowed = f"a list of {' or '.join(_LAYERS)}"
        raise InvalidParameter("config.json: layer_types", kinds, allowed)


def _same(value: Any, other: Any) -> bool:
    """Return whether two values are equal; 1 is 1.0, and true is not 1."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other
