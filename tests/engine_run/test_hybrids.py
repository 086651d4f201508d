"""Models with recurrent states against transformers, through the whole run half."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine_run.cpu_engine import CPUEngine
from tests.engine_run.group_driver import GroupDriver
from tests.engine_run.tiny_models import HYBRIDS, folder_of, judge_of, judged

from tandem.engine.config import EngineConfig, read_facts
from tandem.engine.config.families import check_architecture, check_servable
from tandem.engine.layers.rotary import Rotary, rotated_dim
from tandem.engine.worker.staging import StepShape
from tandem.protocol.card import KVKind
from tandem.protocol.errors import InvalidParameter

PROMPTS = (1, 2, 16, 64, 65, 150)
"""Lengths about those of the convolution, of blocks and of the rule's chunks."""
COUNT = 6


def prompts() -> list[list[int]]:
    rng = random.Random(9)
    return [[rng.randrange(3, 320) for _ in range(length)] for length in PROMPTS]


@pytest.mark.parametrize("name", HYBRIDS)
def test_tokens_and_logits_equal_transformers(name):
    """Chunks of 1 to 150 tokens, next to decodes, go on from the states before them."""
    wanted = [judged(name, prompt, COUNT) for prompt in prompts()]
    for budget in (8, 23, 200):
        driver = GroupDriver(folder_of(name), num_blocks=96)
        seqs = [driver.add(prompt) for prompt in prompts()]
        tokens = driver.generate(seqs, COUNT, budget=budget)
        for seq, got, (want, logits) in zip(seqs, tokens, wanted, strict=True):
            assert got == want
            torch.testing.assert_close(driver.logits(seq)[:COUNT], logits, atol=5e-4, rtol=0)


def test_padded_steps_leave_states_as_they_are():
    """Steps have the shapes of graphs; their padding is in a block of NaN."""
    name = "qwen3_5"
    driver = GroupDriver(folder_of(name), num_blocks=96)
    shapes = (StepShape(8, 0, 0), StepShape(8, 90, 7))
    run = driver.pad(*shapes)
    seqs = [driver.add(prompt) for prompt in prompts()]
    tokens = driver.generate(seqs, COUNT, budget=43)
    assert tokens == [judged(name, prompt, COUNT)[0] for prompt in prompts()]
    assert set(run) == set(shapes)


def test_a_preempted_sequence_begins_with_an_empty_state():
    name, prompt = "qwen3_5", prompts()[-1]
    driver = GroupDriver(folder_of(name))
    seq = driver.add(prompt)
    driver.generate([seq], 3, budget=64)
    again = driver.preempt(seq)
    assert driver.generate([again], COUNT, budget=31) == [judged(name, prompt, COUNT)[0]]


@pytest.mark.parametrize("name", ["gemma3", *HYBRIDS])
def test_an_engine_continues_cached_prefixes(name):
    """States and windows of a prefix come from the cache, in a step with other prompts."""
    settings: dict[str, Any] = {
        "num_gpu_blocks_override": 120,
        "dtype": "float32",
        "max_num_batched_tokens": 64,
    }
    engine = CPUEngine(folder_of(name), **settings)
    wanted = [judged(name, prompt, COUNT)[0] for prompt in prompts()]
    assert engine.generate(prompts(), COUNT) == wanted
    engine.cached.clear()
    assert engine.generate(prompts(), COUNT) == wanted
    assert max(engine.cached.values()) == 144


def test_bfloat16_stays_near_float32():
    """Logits are near those of float32 over the same rounded weights, as transformers' are."""
    name = "qwen3_5"
    for prompt in prompts():
        driver = GroupDriver(folder_of(name), dtype="bfloat16")
        seq = driver.add(prompt)
        driver.generate([seq], 1, budget=64)
        want = judged(name, prompt, 1, torch.bfloat16)[1]
        assert (driver.logits(seq) - want).norm() / want.norm() < 0.08


@pytest.mark.parametrize("name", HYBRIDS)
def test_rotated_parts_of_heads_have_the_angles_of_transformers(name):
    facts = EngineConfig.of(folder_of(name), device="cpu").facts
    rotary = Rotary(facts, dtype=torch.float32, device=torch.device("cpu"))
    positions = torch.arange(0, 512, 7)
    cos, sin = judge_of(name).model.rotary_emb(torch.zeros(1), positions[None])
    got, half, rotated = rotary(positions), facts.head_dim // 2, rotated_dim(facts)
    assert rotated == cos.shape[-1] < facts.head_dim
    torch.testing.assert_close(got.cos[:, : rotated // 2], cos[0][:, : rotated // 2])
    torch.testing.assert_close(got.sin[:, half : half + rotated // 2], sin[0][:, : rotated // 2])
    assert (got.cos[:, rotated // 2 : half] == 1).all()
    assert (got.sin[:, rotated // 2 : half] == 0).all()


TEXT: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 248320,
    "max_position_embeddings": 262144,
    "linear_num_value_heads": 16,
    "attn_output_gate": True,
    "mamba_ssm_dtype": "float32",
    "full_attention_interval": 4,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
}


@pytest.fixture
def read(tmp_path: Path):
    def facts(config: dict[str, Any]):
        (tmp_path / "config.json").write_text(json.dumps(config))
        found = read_facts(tmp_path)
        check_servable(found)
        return found

    return facts


def test_facts_are_those_of_config_json(read):
    facts = read(TEXT)
    assert [i for i, kind in enumerate(facts.kinds) if kind is KVKind.FULL] == list(range(3, 24, 4))
    assert (facts.head_dim, facts.rope.partial, facts.rope.theta) == (256, 0.25, 1e7)
    assert facts.linear.channels == 2 * 16 * 128 + 16 * 128
    assert facts.linear.state_size == 128 * 128 + 3 * facts.linear.channels // 16


def test_what_transformers_writes_is_taken(read):
    import transformers

    config = json.loads(transformers.Qwen3_5TextConfig().to_json_string(use_diff=False))
    facts = read(config | {"architectures": ["Qwen3_5ForCausalLM"]})
    assert facts.kinds.count(KVKind.STATE) == 24


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention_bias", True),
        ("attn_output_gate", False),
        ("mamba_ssm_dtype", "bfloat16"),
        ("mtp_num_hidden_layers", 1),
        ("num_experts", 8),
        ("linear_num_value_heads", 24),
        ("linear_conv_kernel_dim", 0),
        ("full_attention_interval", 0),
        ("layer_types", ["sliding_attention"] * 24),
        ("hidden_act", "gelu"),
        ("partial_rotary_factor", 0.0),
    ],
)
def test_variants_that_are_not_computed_are_refused_by_name(read, key, value):
    config = {each: found for each, found in TEXT.items() if each != "rope_parameters"}
    with pytest.raises(InvalidParameter, match=key):
        read(config | {key: value})


def test_quantized_weights_are_refused_by_name(read):
    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    with pytest.raises(InvalidParameter, match="quantization_config"):
        read(TEXT | {"quantization_config": fp8})


@pytest.mark.parametrize("name", ["Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForCausalLM"])
def test_relatives_are_refused_by_name(name):
    with pytest.raises(InvalidParameter, match=r"(images|experts) cannot be computed yet"):
        check_architecture({"architectures": [name]})
