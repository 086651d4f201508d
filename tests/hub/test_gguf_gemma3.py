"""Gemma 3 from GGUF: settings that llama.cpp keeps in its code, norms and SentencePiece."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from tests.hub.conftest import tiny_tensors
from tokenizers import Tokenizer

from tandem.hub import UnsupportedModel, prepare
from tandem.hub.gguf.gemma import query_scalar
from tandem.hub.gguf.head import START_BYTES, sketch

Build = Callable[..., Path]


@pytest.fixture
def converted(gguf_file: Build, tmp_path: Path) -> Callable[..., Path]:
    def build(**extra: Any) -> Path:
        keys = {key.replace("__", "."): value for key, value in extra.items()}
        source = str(gguf_file("gemma3", extra=keys))
        return prepare(source, cache_dir=tmp_path / "cache").path

    return build


def test_config_has_windows_and_two_ropes(converted: Build):
    scaling = {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0}
    config = json.loads((converted(**scaling) / "config.json").read_text())
    expected = {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 8,
        "sliding_window": 64,
        "sliding_window_pattern": 6,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    }
    assert {key: config.get(key) for key in expected} == expected


def test_the_models_keys_replace_defaults(converted: Build):
    keys = {"gemma3.rope.freq_base_swa": 500.0, "gemma3.attention.sliding_window_pattern": 2}
    config = json.loads((converted(**keys) / "config.json").read_text())
    assert config["rope_parameters"]["sliding_attention"]["rope_theta"] == 500.0
    assert config["sliding_window_pattern"] == 2


def test_the_largest_model_scales_queries_by_its_hidden_size():
    assert query_scalar(layers=62, hidden=5376, heads=32, head_dim=128) == 168
    assert query_scalar(layers=48, hidden=3840, heads=16, head_dim=256) == 256


def test_the_start_of_a_file_shows_the_same_model(gguf_file: Build, converted: Build):
    """A model is checked before its weights are read, by what the engine reads of config.json."""
    with gguf_file("gemma3").open("rb") as file:
        found = sketch(file.read(START_BYTES), "a file", {"gemma3": "Gemma3ForCausalLM"})
    assert found is not None
    config = json.loads((converted() / "config.json").read_text())
    assert {key: config.get(key) for key in found} == found


def test_norms_are_stored_without_the_one_that_is_added(converted: Build):
    weights, source = load_file(converted() / "model.safetensors"), tiny_tensors("gemma3")
    for ours, theirs in {
        "model.norm": "output_norm",
        "model.layers.0.input_layernorm": "blk.0.attn_norm",
        "model.layers.0.self_attn.q_norm": "blk.0.attn_q_norm",
        "model.layers.0.self_attn.k_norm": "blk.0.attn_k_norm",
        "model.layers.0.post_attention_layernorm": "blk.0.post_attention_norm",
        "model.layers.0.pre_feedforward_layernorm": "blk.0.ffn_norm",
        "model.layers.0.post_feedforward_layernorm": "blk.0.post_ffw_norm",
    }.items():
        np.testing.assert_array_equal(weights[f"{ours}.weight"], source[f"{theirs}.weight"] - 1)
    rows = source["blk.0.attn_q.weight"]
    np.testing.assert_array_equal(weights["model.layers.0.self_attn.q_proj.weight"], rows)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("abc", ["<bos>", "ab", "c"]),
        (" abc", ["<bos>", "▁", "ab", "c"]),
        (" a\n\nbc", ["<bos>", "▁a", "\n\n", "bc"]),
        ("a  b", ["<bos>", "a", "  ", "b"]),
        ("é", ["<bos>", "<0xC3>", "<0xA9>"]),
    ],
)
def test_the_pair_with_the_best_score_is_merged_first(
    converted: Build, text: str, tokens: list[str]
):
    """Tokens equal those of SentencePiece, which merges by scores; text comes back unchanged."""
    made = Tokenizer.from_file(str(converted() / "tokenizer.json"))
    encoded = made.encode(text)
    assert encoded.tokens == tokens
    assert made.decode(encoded.ids) == text


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("gemma3.attention.sliding_window", 0),
        ("gemma3.attention.sliding_window_pattern", 0),
        ("gemma3.rope.freq_base_swa", -1.0),
        ("gemma3.final_logit_softcapping", 30.0),
        ("tokenizer.ggml.scores", [0.5]),
        ("tokenizer.ggml.token_type", [1]),
        ("tokenizer.ggml.add_space_prefix", True),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(converted: Build, key: str, value: Any):
    with pytest.raises(UnsupportedModel, match=rf"{key} .* allowed"):
        converted(**{key: value})
