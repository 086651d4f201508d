"""Rotary frequencies of every spelling of config.json are those that transformers computes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from tandem.engine.config.read import facts_of
from tandem.engine.layers.rotary import Rotary
from tandem.protocol.errors import InvalidParameter

SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "vocab_size": 32,
    "max_position_embeddings": 4096,
}
CONFIGS = {
    "LlamaForCausalLM": "LlamaConfig",
    "MistralForCausalLM": "MistralConfig",
    "Qwen2ForCausalLM": "Qwen2Config",
    "Qwen3ForCausalLM": "Qwen3Config",
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 1024}
SCALINGS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "default": {"rope_type": "default"},
    "linear, old word": {"type": "linear", "factor": 2.0},
    "linear": {"rope_type": "linear", "factor": 2.0},
    "yarn, old word": {"type": "yarn", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    "yarn with factors": {
        "rope_type": "yarn",
        "factor": 4.0,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "attention_factor": 0.7,
    },
    "llama3": {"rope_type": "llama3", **LLAMA3},
    "both words": {"type": "linear", "rope_type": "yarn", "factor": 4.0},
    "its own base": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5e5},
}
THETAS: dict[str, dict[str, Any]] = {"no base": {}, "a base beside": {"rope_theta": 1e6}}


def _frequencies(config: dict[str, Any]) -> tuple[torch.Tensor, float]:
    made = Rotary(facts_of(config), dtype=torch.float32, device=torch.device("cpu"))
    return made._inverse, made._factor


@pytest.mark.parametrize("architecture", CONFIGS)
@pytest.mark.parametrize("theta", THETAS.values(), ids=THETAS)
@pytest.mark.parametrize("old", SCALINGS.values(), ids=SCALINGS)
def test_frequencies_are_those_of_transformers(
    architecture: str, theta: dict[str, Any], old: dict[str, Any]
):
    """By rope_scaling, by rope_parameters, or by both of them in one file."""
    import transformers
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    for new in SCALINGS.values():
        said = {"rope_scaling": old, "rope_parameters": new}
        said = {key: value for key, value in said.items() if value}
        config = {"architectures": [architecture], **SHAPE, **theta, **said}
        family = getattr(transformers, CONFIGS[architecture])
        theirs = LlamaRotaryEmbedding(family.from_dict(copy.deepcopy(config)))

        inverse, factor = _frequencies(config)

        torch.testing.assert_close(inverse, theirs.inv_freq, rtol=1e-6, atol=0)
        assert factor == pytest.approx(theirs.attention_scaling)


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_a_rotary_embedding_for_each_kind_of_layer_is_refused(key: str):
    """transformers' dictionaries by type of layer."""
    said = {key: {"full_attention": {"rope_type": "yarn", "factor": 4.0}}}
    config = {"architectures": ["LlamaForCausalLM"], **SHAPE, **said}
    with pytest.raises(InvalidParameter, match=f"{key}.*one rotary embedding for all layers"):
        facts_of(config)
