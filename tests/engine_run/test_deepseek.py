"""Models with latent attention against transformers, through the whole run half."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.engine_run.cpu_engine import CPUEngine
from tests.engine_run.fp8_models import QUANTIZATION, fp8_folders, judged_fp8
from tests.engine_run.group_driver import GroupDriver
from tests.engine_run.kv_bytes import DEEPSEEK_V2_LITE
from tests.engine_run.tiny_models import LATENTS, folder_of, judge_of, judged

from tandem.engine.attention import latent as attention
from tandem.engine.config import EngineConfig, ModelFacts, read_facts
from tandem.engine.config.experts import Scoring
from tandem.engine.config.families import check_servable
from tandem.engine.core.step_notes import StepCosts
from tandem.engine.loader import open_weights
from tandem.engine.models import load_model
from tandem.engine.models.decoder import Decoder, Layer
from tandem.engine.models.deepseek import LatentAttention
from tandem.engine.worker.staging import StepShape
from tandem.kernels.attention import PagedBatch
from tandem.protocol.card import KVKind
from tandem.protocol.errors import InvalidParameter

PROMPTS = (1, 2, 16, 33, 150)
COUNT = 6


def prompts() -> list[list[int]]:
    rng = random.Random(9)
    return [[rng.randrange(3, 320) for _ in range(length)] for length in PROMPTS]


@pytest.mark.parametrize("name", LATENTS)
def test_tokens_and_logits_equal_transformers(name: str) -> None:
    """Chunks are absorbed if they are short, next to decodes; whole prompts are expanded."""
    for budget in (8, 200):
        driver = GroupDriver(folder_of(name))
        seqs = [driver.add(prompt) for prompt in prompts()]
        tokens = driver.generate(seqs, COUNT, budget=budget)
        for seq, prompt, got in zip(seqs, prompts(), tokens, strict=True):
            want, logits = judged(name, prompt, COUNT)
            assert got == want
            torch.testing.assert_close(driver.logits(seq)[:COUNT], logits, atol=5e-4, rtol=0)


@pytest.mark.parametrize("expanded", [False, True])
def test_either_form_of_attention_gives_the_tokens(
    expanded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_is_expanded", lambda *_: expanded)
    driver = GroupDriver(folder_of("deepseek-v3"))
    seqs = [driver.add(prompt) for prompt in prompts()]
    wanted = [judged("deepseek-v3", prompt, COUNT)[0] for prompt in prompts()]
    assert driver.generate(seqs, COUNT, budget=43) == wanted


def test_the_form_of_attention_has_fewer_multiplications() -> None:
    """DeepSeek-V3 expands from some 170 queries of a long context on, and any whole prompt."""
    kv_b, lens = torch.empty(1, 256, 512), torch.ones(1)
    for queries, keys, expanded in ((1, 4096, False), (128, 65536, False), (192, 65536, True)):
        batch = PagedBatch(lens, lens, lens, queries, keys)
        assert attention._is_expanded(kv_b, batch) is expanded
    whole = PagedBatch(lens, lens, lens, 20, 20)
    assert attention._is_expanded(kv_b, whole)
    assert not attention._is_expanded(kv_b.expand(2**18, -1, -1), whole)


def test_padded_steps_change_no_token() -> None:
    driver = GroupDriver(folder_of("deepseek-v3"))
    shapes = (StepShape(8, 0, 0), StepShape(8, 90, 7))
    run = driver.pad(*shapes)
    seqs = [driver.add(prompt) for prompt in prompts()]
    tokens = driver.generate(seqs, COUNT, budget=43)
    assert tokens == [judged("deepseek-v3", prompt, COUNT)[0] for prompt in prompts()]
    assert set(run) == set(shapes)


def test_bfloat16_stays_near_float32() -> None:
    for prompt in prompts():
        driver = GroupDriver(folder_of("deepseek-v3"), dtype="bfloat16")
        seq = driver.add(prompt)
        driver.generate([seq], 1, budget=64)
        want = judged("deepseek-v3", prompt, 1, torch.bfloat16)[1]
        assert (driver.logits(seq) - want).norm() / want.norm() < 0.08


@pytest.mark.parametrize("name", ["deepseek-v2-lite", "deepseek-v3"])
def test_fp8_weights_give_the_tokens_of_what_they_stand_for(name: str) -> None:
    held, meant = fp8_folders(name)
    engine = CPUEngine(held)
    assert engine.generate(prompts()[-2:], COUNT) == [
        judged_fp8(meant, name, prompt, COUNT) for prompt in prompts()[-2:]
    ]


def model_of(folder: Path) -> Decoder:
    config = EngineConfig.of(folder, device="cpu")
    with open_weights(config, progress=False) as weights:
        model = load_model(config.facts, weights)
    assert isinstance(model, Decoder)
    return model


def test_the_expansion_is_plain_in_any_form_of_weights() -> None:
    held, meant = fp8_folders("deepseek-v3")
    for one, other in zip(model_of(held).layers, model_of(meant).layers, strict=True):
        assert isinstance(one, Layer)
        assert isinstance(other, Layer)
        assert isinstance(one.attention, LatentAttention)
        assert isinstance(other.attention, LatentAttention)
        assert torch.equal(one.attention.kv_b, other.attention.kv_b)


def test_the_layer_that_predicts_another_token_is_not_read(tmp_path: Path) -> None:
    source = folder_of("deepseek-v3-dense")
    tensors = load_file(source / "model.safetensors")
    more = {f"model.layers.3.{name}": torch.zeros(2) for name in ("eh_proj.weight", "enorm.weight")}
    save_file({**tensors, **more}, tmp_path / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    assert len(model_of(tmp_path).layers) == 3


@pytest.mark.parametrize("name", LATENTS)
def test_a_token_has_a_latent_and_a_rotated_key(name: str) -> None:
    config = EngineConfig.of(folder_of(name), device="cpu", dtype="bfloat16")
    (group,) = config.layout.groups
    assert group.kind is KVKind.LATENT
    assert config.layout.token_bytes == 3 * (32 + 8) * 2


def test_ranks_hold_whole_latents() -> None:
    config = EngineConfig.of(folder_of("deepseek-v3"), device="cpu", revision="r")
    two = config.with_(tensor_parallel_size=2)
    assert two.layout == config.layout
    assert two.fingerprint().compatibility == config.fingerprint().compatibility


def test_codes_for_latents_are_refused_by_name() -> None:
    with pytest.raises(InvalidParameter, match=r"kv_cache_dtype: 'fp8'.*latents"):
        EngineConfig.of(folder_of("deepseek-v3"), device="cpu", kv_cache_dtype="fp8")


V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "aux_loss_alpha": 0.001,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "pretraining_tp": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": QUANTIZATION,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
"""config.json of DeepSeek-V3."""


@pytest.fixture
def read(tmp_path: Path):
    def facts(config: dict[str, Any]) -> ModelFacts:
        (tmp_path / "config.json").write_text(json.dumps(config))
        found = read_facts(tmp_path)
        check_servable(found)
        return found

    return facts


def test_facts_are_those_of_config_json(read, tmp_path: Path) -> None:
    facts = read(V3)
    assert facts.latent.width == 576
    assert facts.kinds == (KVKind.LATENT,) * 61
    assert facts.attention_scale == pytest.approx(192**-0.5 * 1.36888794**2)
    assert facts.derived_max_len == 163840
    experts = facts.experts
    assert (experts.layers[0], experts.scoring, experts.routed_scale) == (3, Scoring.SIGMOID, 2.5)
    assert (experts.num_groups, experts.chosen_groups, experts.shared_width) == (8, 4, 2048)
    assert experts.norm_topk
    assert experts.correction_bias
    config = EngineConfig.of(tmp_path, facts=facts, device="cpu", tensor_parallel_size=8)
    assert config.layout.token_bytes == 61 * 576 * 2
    weights = StepCosts(facts, config.layout, "bfloat16")._linear
    assert weights == pytest.approx(36e9, rel=0.02)  # 37 billion with the vocabulary's


def test_groups_of_v2_are_only_those_of_their_method(read) -> None:
    """transformers ignores n_group with the greedy method."""
    lite = read(DEEPSEEK_V2_LITE | {"n_group": 8, "topk_group": 3})
    assert (lite.experts.num_groups, lite.experts.scoring) == (1, Scoring.SOFTMAX)
    assert lite.experts.shared_width == 2 * 1408
    method = {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3}
    assert read(DEEPSEEK_V2_LITE | method).experts.chosen_groups == 3


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention_bias", True),
        ("moe_layer_freq", 2),
        ("scoring_func", "softmax"),
        ("topk_method", "greedy"),
        ("n_group", 7),
        ("topk_group", 9),
        ("num_experts_per_tok", 129),
        ("first_k_dense_replace", -1),
        ("rope_interleave", False),
        ("num_nextn_predict_layers", 2),
        ("qk_rope_head_dim", 63),
        ("kv_lora_rank", 0),
        ("q_lora_rank", 0),
        ("hidden_act", "gelu"),
    ],
)
def test_variants_that_are_not_computed_are_refused_by_name(read, key: str, value: Any) -> None:
    with pytest.raises(InvalidParameter, match=key):
        read(V3 | {key: value})


def test_weights_of_experts_of_v2_are_not_normed(read) -> None:
    with pytest.raises(InvalidParameter, match="norm_topk_prob"):
        read(DEEPSEEK_V2_LITE | {"norm_topk_prob": True})


@pytest.mark.parametrize("name", ["deepseek-v2-lite", "deepseek-v3"])
def test_what_transformers_writes_is_taken(read, name: str) -> None:
    config = json.loads(judge_of(name).config.to_json_string(use_diff=False))
    facts = read(config | {"architectures": [type(judge_of(name)).__name__]})
    assert facts.latent.rank == 32
