"""Keys of config.json that change what a model computes are followed or refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tandem.engine.config.families import check_servable
from tandem.engine.config.read import read_facts
from tandem.protocol.errors import InvalidParameter

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 32,
    "max_position_embeddings": 128,
}
THEIRS = {
    "LlamaForCausalLM": "LlamaConfig",
    "MistralForCausalLM": "MistralConfig",
    "Qwen2ForCausalLM": "Qwen2Config",
    "Qwen3ForCausalLM": "Qwen3Config",
    "Phi3ForCausalLM": "Phi3Config",
    "GraniteForCausalLM": "GraniteConfig",
    "Olmo2ForCausalLM": "Olmo2Config",
    "Olmo3ForCausalLM": "Olmo3Config",
    "SmolLM3ForCausalLM": "SmolLM3Config",
    "GlmForCausalLM": "GlmConfig",
    "Glm4ForCausalLM": "Glm4Config",
    "Cohere2ForCausalLM": "Cohere2Config",
    "Starcoder2ForCausalLM": "Starcoder2Config",
    "BertModel": "BertConfig",
    "RobertaModel": "RobertaConfig",
    "XLMRobertaModel": "XLMRobertaConfig",
}


@pytest.fixture
def read(tmp_path: Path) -> Callable[[dict[str, Any]], Any]:
    """Facts of a folder with this config.json."""

    def facts(config: dict[str, Any]) -> Any:
        (tmp_path / "config.json").write_text(json.dumps(config))
        return read_facts(tmp_path)

    return facts


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("dual_chunk_attention_config", {"chunk_size": 262144}),
        ("attn_logit_softcapping", 50.0),
        ("final_logit_softcapping", 30.0),
        ("attention_multiplier", 0.0078125),
        ("residual_multiplier", 0.22),
        ("embedding_multiplier", 12.0),
        ("logits_scaling", 8.0),
        ("logit_scale", 0.0625),
        ("clip_qkv", 8.0),
        ("query_pre_attn_scalar", 256),
        ("use_qk_norm", True),
        ("qk_layernorm", True),
        ("attention_chunk_size", 8192),
        ("no_rope_layers", [1, 0]),
        ("sliding_window_pattern", 6),
        ("num_experts", 8),
        ("num_local_experts", 8),
        ("alibi", True),
        ("use_parallel_residual", True),
        ("scale_emb", 12),
        ("norm_type", "layernorm_np"),
        ("use_mup", True),
        ("layer_types", ["full_attention", "linear_attention"]),
        ("layer_types", "full_attention"),
        ("attention_of_tomorrow", 2),
        ("quantization", {"group_size": 64, "bits": 4}),
    ],
)
def test_a_key_that_changes_numbers_is_refused_by_its_name(
    read: Callable[..., Any], key: str, value: Any
):
    """Nothing is passed over in silence."""
    with pytest.raises(InvalidParameter, match=rf"config\.json: {key}: "):
        read(LLAMA | {key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attn_logit_softcapping", None),
        ("residual_multiplier", 1.0),
        ("num_experts", 0),
        ("use_qk_norm", False),
        ("qkv_bias", True),
        ("attention_dropout", 0.1),
        ("layer_types", ["full_attention", "full_attention"]),
        ("_attn_implementation_autoset", True),
        ("unsloth_version", "2025.1"),
        ("model_max_length", 4096),
        ("transformers.js_config", {"dtype": "q4"}),
        ("pad_token_id", 3),
    ],
)
def test_a_key_that_changes_nothing_is_taken(read: Callable[..., Any], key: str, value: Any):
    """It is off, or speaks of no part of the computation."""
    assert read(LLAMA | {key: value}).num_layers == 2


@pytest.mark.parametrize("architecture", THEIRS)
def test_what_transformers_writes_is_taken(read: Callable[..., Any], architecture: str):
    """All keys of a family's own class, by their defaults."""
    import transformers

    config = json.loads(
        getattr(transformers, THEIRS[architecture])().to_json_string(use_diff=False)
    )
    assert read(config | {"architectures": [architecture]}).architecture == architecture


LONGROPE = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}
VARIANTS: list[tuple[str, dict[str, Any], str]] = [
    ("Phi3", {"rope_scaling": LONGROPE}, "longrope"),
    ("Phi3", {"partial_rotary_factor": 0.1}, "partial_rotary_factor: 0.1 .*even number"),
    ("Phi3", {"attention_bias": True}, "attention_bias: True .*false"),
    ("Phi3", {"full_attn_mod": 2}, "full_attn_mod: 2 .*; 1"),
    ("Granite", {"residual_multiplier": -1.0}, "residual_multiplier: -1.0 .*above 0"),
    ("Granite", {"logits_scaling": "8"}, "logits_scaling: '8' .*number"),
    ("Olmo2", {"clip_qkv": 8.0}, "clip_qkv"),
    ("Olmo3", {"sliding_window": None}, "sliding_window: None .*positive"),
    ("Olmo3", {"rope_parameters": {"sliding_attention": LONGROPE}}, "sliding_attention"),
    ("SmolLM3", {"no_rope_layers": [1]}, "no_rope_layers: .*each of the 2 layers"),
    ("SmolLM3", {"no_rope_layers": [1, 2]}, "no_rope_layers"),
    ("SmolLM3", {"layer_types": ["sliding_attention"] * 2}, "sliding_window"),
    ("Glm4", {"hidden_act": "gelu"}, "hidden_act"),
    ("Glm4", {"rope_parameters": {"partial_rotary_factor": 1.5}}, "partial_rotary_factor: 1.5"),
    ("Cohere2", {"use_parallel_block": False}, "use_parallel_block: False .*true"),
    ("Cohere2", {"layer_switch": 3}, "layer_switch: 3 .*; 4"),
    ("Cohere2", {"use_embedding_sharing": False}, "use_embedding_sharing"),
    ("Starcoder2", {"use_bias": "yes"}, "use_bias: 'yes'"),
    ("Starcoder2", {"mlp_type": "gated"}, "mlp_type: 'gated'"),
]


@pytest.mark.parametrize(("family", "changes", "words"), VARIANTS)
def test_a_variant_that_the_layers_do_not_compute_is_refused_by_name(
    read: Callable[..., Any], family: str, changes: dict[str, Any], words: str
):
    plain = LLAMA | {"architectures": [f"{family}ForCausalLM"], "head_dim": 16}
    check_servable(read(plain))
    with pytest.raises(InvalidParameter, match=words):
        check_servable(read(plain | changes))


PUBLISHED: dict[str, dict[str, Any]] = {
    "Cohere2": {
        "layer_switch": 4,
        "order_of_interleaved_layers": "local_attn_first",
        "position_embedding_type": "rope_gptj",
        "rotary_pct": 1.0,
        "sliding_window_pattern": 4,
        "use_embedding_sharing": True,
        "use_gated_activation": True,
        "use_parallel_block": True,
        "use_parallel_embedding": False,
        "use_qk_norm": False,
    },
    "Phi3": {"full_attn_mod": 1, "lm_head_bias": False, "resid_pdrop": 0.0, "sliding_window": 2047},
    "SmolLM3": {"max_window_layers": 28, "no_rope_layer_interval": 4, "pretraining_tp": 2},
    "Starcoder2": {
        "attention_softmax_in_fp32": True,
        "layer_norm_epsilon": 1e-5,
        "mlp_type": "default",
        "norm_type": "layer_norm",
        "residual_dropout": 0.1,
        "scale_attention_softmax_in_fp32": True,
        "scale_attn_weights": True,
        "sliding_window": 4096,
    },
}
"""Keys of published checkpoints that transformers does not write."""


@pytest.mark.parametrize("family", PUBLISHED)
def test_further_keys_of_published_checkpoints_are_taken(read: Callable[..., Any], family: str):
    config = LLAMA | {"architectures": [f"{family}ForCausalLM"]} | PUBLISHED[family]
    check_servable(read(config))


@pytest.mark.parametrize("head", ["lm_head.weight", "other"])
@pytest.mark.parametrize("differs", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_a_tied_head_beside_another_one_is_refused(
    tmp_path: Path, read: Callable[..., Any], head: str, differs: bool, tied: bool
):
    """A copy of the embeddings is right either way."""
    table = np.random.default_rng(0).standard_normal((32, 64), dtype=np.float32)
    other = table.copy()
    other[31, 63] += 1.0 if differs else 0.0
    weights = {"model.embed_tokens.weight": table, head: other}
    save_file(weights, tmp_path / "model.safetensors")
    config = LLAMA | {"tie_word_embeddings": tied}
    if tied and differs and head == "lm_head.weight":
        with pytest.raises(InvalidParameter, match=r"tie_word_embeddings.*lm_head\.weight differs"):
            read(config)
    else:
        assert read(config).tie_word_embeddings is tied
