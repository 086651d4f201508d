"""Gemma 3 against transformers, through the whole run half."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine_run.cpu_engine import CPUEngine
from tests.engine_run.embedded import embeds_of
from tests.engine_run.group_driver import GroupDriver
from tests.engine_run.tiny_models import GEMMAS, WINDOW, folder_of, judge_of, judged

from tandem.engine.config import EngineConfig, read_facts
from tandem.engine.config.families import check_architecture, check_servable
from tandem.engine.layers.rotary import Rotary
from tandem.engine.loader import open_weights
from tandem.engine.models import load_model
from tandem.engine.models.decoder import Decoder
from tandem.protocol.card import KVKind
from tandem.protocol.errors import InvalidParameter

PROMPTS = (1, 15, WINDOW, 48, 130)
COUNT = 6


def prompts() -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(3, 320) for _ in range(length)] for length in PROMPTS]


@pytest.mark.parametrize("name", GEMMAS)
def test_tokens_and_logits_equal_transformers(name):
    """Chunks end within and at the borders of blocks and windows, next to decodes."""
    for budget in (23, 64):
        driver = GroupDriver(folder_of(name), num_blocks=96)
        seqs = [driver.add(prompt) for prompt in prompts()]
        tokens = driver.generate(seqs, COUNT, budget=budget)
        for seq, prompt, got in zip(seqs, prompts(), tokens, strict=True):
            want, logits = judged(name, prompt, COUNT)
            assert got == want
            torch.testing.assert_close(driver.logits(seq)[:COUNT], logits, atol=5e-4, rtol=0)


REAL: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 262144,
}
"""config.json in the form of gemma-3-1b-it."""


@pytest.fixture
def read(tmp_path: Path):
    def facts(config: dict[str, Any]):
        (tmp_path / "config.json").write_text(json.dumps(config))
        found = read_facts(tmp_path)
        check_servable(found)
        return found

    return facts


def test_facts_are_those_of_config_json(read):
    facts = read(REAL)
    full = [i for i, kind in enumerate(facts.kinds) if kind is KVKind.FULL]
    assert full == [5, 11, 17, 23]
    assert (facts.sliding_window, facts.derived_max_len) == (512, 32768)
    assert facts.eos_token_ids == (1, 106)
    assert facts.tie_word_embeddings
    assert (facts.rope.theta, facts.local_rope.theta) == (1e6, 1e4)
    assert facts.attention_scale == 1 / 16


def test_a_stated_length_is_after_scaling(read):
    scaled = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    assert read(REAL | scaled).derived_max_len == 32768


def _as_transformers_saves(config: dict[str, Any]) -> dict[str, Any]:
    import transformers

    saved: dict[str, Any] = transformers.Gemma3TextConfig.from_dict(dict(config)).to_dict()
    return saved | {"architectures": config["architectures"]}


@pytest.mark.parametrize("scaling", [None, {"rope_type": "linear", "factor": 8.0}])
@pytest.mark.parametrize("pattern", [2, 6])
def test_old_and_new_spelling_are_one_model(read, scaling, pattern):
    """Facts and frequencies are those of transformers, which saves the newer spelling."""
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding, Gemma3TextConfig

    old = REAL | {"rope_scaling": scaling, "sliding_window_pattern": pattern}
    new = _as_transformers_saves(old)
    assert "rope_theta" not in new
    assert read(new).layer_kinds == read(old).layer_kinds
    assert (read(new).rope, read(new).local_rope) == (read(old).rope, read(old).local_rope)
    theirs = Gemma3RotaryEmbedding(Gemma3TextConfig.from_dict(dict(new)))
    facts = read(old)
    for rope, kind in ((facts.rope, "full_attention"), (facts.local_rope, "sliding_attention")):
        rotary = Rotary(replace(facts, rope=rope), dtype=torch.float32, device=torch.device("cpu"))
        torch.testing.assert_close(rotary._inverse, getattr(theirs, f"{kind}_inv_freq"))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attn_logit_softcapping", 50.0),
        ("final_logit_softcapping", 30.0),
        ("use_bidirectional_attention", True),
        ("hidden_activation", "gelu"),
        ("hidden_act", "silu"),
        ("query_pre_attn_scalar", 0),
        ("sliding_window", None),
        ("sliding_window_pattern", 0),
        ("layer_types", ["linear_attention"] * 26),
        ("rope_parameters", {"rope_type": "default"}),
        ("rope_parameters", {"chunked_attention": {"rope_type": "default"}}),
        ("rope_parameters", {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}),
        ("rope_local_base_freq", -1.0),
        ("partial_rotary_factor", 0.5),
    ],
)
def test_variants_that_are_not_computed_are_refused_by_name(read, key, value):
    with pytest.raises(InvalidParameter, match=key):
        read(REAL | {key: value})


def test_the_saved_pattern_must_be_the_one_that_is_read(read):
    with pytest.raises(InvalidParameter, match="_sliding_window_pattern: 3"):
        read(REAL | {"_sliding_window_pattern": 3})
    kinds = ["sliding_attention"] * 25 + ["full_attention"]
    assert (
        read(REAL | {"_sliding_window_pattern": 3, "layer_types": kinds})
        .kinds[:25]
        .count(KVKind.WINDOW)
        == 25
    )


def test_a_multimodal_gemma_is_refused_by_name(read):
    with pytest.raises(InvalidParameter, match=r"images.*nearest is Gemma3ForCausalLM"):
        check_architecture({"architectures": ["Gemma3ForConditionalGeneration"]})


def test_bfloat16_stays_near_float32():
    """Logits are near those of float32 over the same rounded weights, as transformers' are."""
    name = "gemma3"
    for prompt in prompts():
        driver = GroupDriver(folder_of(name), dtype="bfloat16")
        seq = driver.add(prompt)
        driver.generate([seq], 1, budget=64)
        want = judged(name, prompt, 1, torch.bfloat16)[1]
        assert (driver.logits(seq) - want).norm() / want.norm() < 0.08


def test_a_short_model_has_both_kinds_before_its_last_layer():
    config = EngineConfig.of(folder_of("gemma3-last-full"), device="cpu")
    with open_weights(config, progress=False) as weights:
        model = load_model(config.facts, weights)
    assert isinstance(model, Decoder)
    short = model.shortened(2)
    assert [each.kind for each in short.layers] == [KVKind.WINDOW, *[KVKind.FULL] * 2]


@pytest.mark.parametrize("name", ["gemma3", "granite"])
def test_embeddings_are_taken_as_transformers_takes_them(name):
    """Vectors of a prompt are its inputs_embeds: after Gemma's factor, before Granite's."""
    prompt = prompts()[2]
    vectors = judge_of(name).model.embed_tokens(torch.tensor(prompt))
    engine = CPUEngine(folder_of(name), enable_prompt_embeds=True, num_gpu_blocks_override=60)
    key = engine.add_embeds(embeds_of(vectors.detach()), COUNT)
    assert engine.run()[key.request] == judged(name, prompt, COUNT)[0]
