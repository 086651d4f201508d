"""Models with a mixture of experts against transformers, through the whole run half."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.engine_run.cpu_engine import CPUEngine
from tests.engine_run.forked_rank import ForkedExecutor
from tests.engine_run.form_configs import AWQ
from tests.engine_run.fp8_models import QUANTIZATION, fp8_folders, judged_fp8
from tests.engine_run.group_driver import GroupDriver
from tests.engine_run.moe_models import MXFP4, mxfp4_folders, rounded_folder
from tests.engine_run.tiny_models import MOES, class_of, folder_of, judged
from tests.forked import fork_server

from tandem.engine.config import EngineConfig, ModelFacts, read_facts
from tandem.engine.config.families import check_servable
from tandem.engine.config.servable import check_model
from tandem.engine.core.step_notes import StepCosts
from tandem.engine.loader import LoadError, open_weights
from tandem.engine.models import load_model
from tandem.engine.models.decoder import MLP, Decoder
from tandem.engine.models.moe import MixtureOfExperts
from tandem.engine.step import SchedulerOutput, SeqId, StepRow
from tandem.engine.worker.staging import StepShape
from tandem.protocol.errors import InvalidParameter

PROMPTS = (1, 15, 24, 48, 130)
FULL = {"qwen2-moe", "qwen3-moe-last-dense"}
SHORT = [pytest.param(name, marks=pytest.mark.full) if name in FULL else name for name in MOES]
COUNT = 6


def prompts() -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(3, 320) for _ in range(length)] for length in PROMPTS]


@pytest.mark.parametrize("name", SHORT)
def test_tokens_and_logits_equal_transformers(name: str) -> None:
    """Chunks end anywhere, next to decodes."""
    for budget in (23, 200):
        driver = GroupDriver(folder_of(name))
        seqs = [driver.add(prompt) for prompt in prompts()]
        tokens = driver.generate(seqs, COUNT, budget=budget)
        for seq, prompt, got in zip(seqs, prompts(), tokens, strict=True):
            want, logits = judged(name, prompt, COUNT)
            assert got == want
            torch.testing.assert_close(driver.logits(seq)[:COUNT], logits, atol=2e-4, rtol=0)


def test_padding_changes_no_token() -> None:
    """Rows of padding have NaN, and routes."""
    name = "qwen3-moe"
    driver = GroupDriver(folder_of(name))
    driver.pad(StepShape(8, 0, 0), StepShape(8, 90, 7))
    seqs = [driver.add(prompt) for prompt in prompts()]
    tokens = driver.generate(seqs, COUNT, budget=43)
    assert tokens == [judged(name, prompt, COUNT)[0] for prompt in prompts()]


@pytest.mark.parametrize("name", ["qwen3-moe", pytest.param("mixtral", marks=pytest.mark.full)])
def test_an_engine_preempts_and_continues_cached_prefixes(name: str) -> None:
    settings: dict[str, Any] = {"num_gpu_blocks_override": 16, "max_num_batched_tokens": 64}
    engine = CPUEngine(folder_of(name), **settings)
    wanted = [judged(name, prompt, COUNT)[0] for prompt in prompts()]
    assert engine.generate(prompts(), COUNT) == wanted
    engine.cached.clear()
    assert engine.generate(prompts()[-1:], COUNT) == wanted[-1:]
    assert engine.generate(prompts()[-1:], COUNT) == wanted[-1:]
    assert max(engine.cached.values()) == 128


@pytest.mark.full
@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss"])
def test_bfloat16_is_as_near_to_float32_as_transformers(name: str) -> None:
    """Rounded logits of routers may choose other experts, in both."""
    theirs = class_of(name).from_pretrained(folder_of(name), dtype=torch.bfloat16).eval()
    errors = torch.zeros(2)
    for prompt in prompts():
        driver = GroupDriver(folder_of(name), dtype="bfloat16")
        seq = driver.add(prompt)
        driver.generate([seq], 1, budget=64)
        with torch.inference_mode():
            other = theirs(torch.tensor([prompt])).logits[0, -1].float()
        want = judged(name, prompt, 1, torch.bfloat16)[1][0]
        found = (driver.logits(seq)[0], other)
        errors += torch.stack([(each - want).norm() / want.norm() for each in found])
    assert errors[0] < 1.2 * errors[1]


@pytest.fixture
def executor(monkeypatch: pytest.MonkeyPatch) -> Iterator[ForkedExecutor]:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    fork_server("rank")
    made = ForkedExecutor()
    yield made
    made.stop()


def two_ranks(folder: Path, executor: ForkedExecutor) -> list[list[int]]:
    settings: dict[str, Any] = {"tensor_parallel_size": 2, "num_gpu_blocks_override": 60}
    return CPUEngine(folder, executor=executor, **settings).generate(prompts(), COUNT)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "qwen3-moe",
        *(pytest.param(each, marks=pytest.mark.full) for each in ("qwen2-moe", "gpt-oss")),
    ],
)
def test_two_ranks_cut_each_expert(executor: ForkedExecutor, name: str) -> None:
    want = [judged(name, prompt, COUNT)[0] for prompt in prompts()]
    assert two_ranks(folder_of(name), executor) == want


@pytest.mark.full
@pytest.mark.slow
def test_two_ranks_cut_numbers_before_they_are_in_blocks(executor: ForkedExecutor) -> None:
    held, meant = mxfp4_folders()
    assert two_ranks(held, executor) == CPUEngine(meant).generate(prompts(), COUNT)


@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss"])
def test_experts_rounded_at_load_have_the_tokens_of_the_scaled_weights(name: str) -> None:
    made = CPUEngine(folder_of(name), quantization="fp8").generate(prompts(), COUNT)
    meant = rounded_folder() if name == "gpt-oss" else fp8_folders(name)[1]
    assert made == [judged_fp8(meant, name, prompt, COUNT) for prompt in prompts()]


@pytest.mark.parametrize(
    ("name", "wide"), [("qwen3-moe", False), pytest.param("mixtral", True, marks=pytest.mark.full)]
)
def test_experts_in_fp8_have_the_tokens_of_the_scaled_weights(name: str, wide: bool) -> None:
    """Blocks that are cut short, and whole ones."""
    held, meant = fp8_folders(name, wide=wide)
    made = CPUEngine(held).generate(prompts(), COUNT)
    assert made == [judged_fp8(meant, name, prompt, COUNT) for prompt in prompts()]


@pytest.mark.parametrize("kept", [(), pytest.param((1,), marks=pytest.mark.full)])
def test_experts_in_mxfp4_keep_their_numbers(
    kept: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    held, meant = mxfp4_folders(kept)
    with caplog.at_level("INFO", "tandem.engine.quant.fp4"):
        made = CPUEngine(held).generate(prompts(), COUNT)
    assert [each.getMessage() for each in caplog.records] == ["MXFP4 re-coded to fp8 blocks, exact"]
    assert made == [judged_fp8(meant, "gpt-oss", prompt, COUNT) for prompt in prompts()]


def loaded(folder: Path) -> Decoder:
    config = EngineConfig.of(folder, device="cpu", dtype="float32")
    with open_weights(config, progress=False) as weights:
        model = load_model(config.facts, weights)
    assert isinstance(model, Decoder)
    return model


def test_layers_with_experts_are_those_of_the_config() -> None:
    kinds = {
        name: [type(layer.mlp) for layer in loaded(folder_of(name)).layers]
        for name in ("qwen3-moe", "qwen3-moe-last-dense")
    }
    sparse = MixtureOfExperts
    assert kinds == {
        "qwen3-moe": [sparse, MLP, sparse],
        "qwen3-moe-last-dense": [MLP, sparse, MLP],
    }


def test_a_short_model_has_layers_of_each_kind() -> None:
    short = loaded(folder_of("qwen3-moe")).shortened(1)
    assert [type(each.mlp) for each in short.layers] == [MixtureOfExperts, MLP, MixtureOfExperts]


def test_a_tensor_that_no_expert_has_is_named(tmp_path: Path) -> None:
    source = folder_of("qwen3-moe")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.mlp.experts.6.up_proj.weight"] = torch.zeros(40, 48)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    with pytest.raises(LoadError, match=r"does not know 1 .*experts\.6\.up_proj"):
        loaded(tmp_path)


Read = Callable[..., ModelFacts]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """Facts of the folder of a tiny model with other keys."""

    def facts(name: str, **changed: Any) -> ModelFacts:
        config = json.loads((folder_of(name) / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | changed))
        found = read_facts(tmp_path)
        check_servable(found)
        return found

    return facts


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("qwen3-moe", "num_experts_per_tok", 7),
        ("qwen3-moe", "num_experts", 8),
        ("qwen3-moe", "norm_topk_prob", 1),
        ("qwen3-moe", "mlp_only_layers", "none"),
        ("qwen3-moe", "decoder_sparse_step", 0),
        ("qwen3-moe", "moe_intermediate_size", None),
        ("qwen3-moe", "scoring_func", "sigmoid"),
        ("qwen3-moe", "n_group", 2),
        ("qwen3-moe", "topk_group", 2),
        ("qwen3-moe", "routed_scaling_factor", 2.5),
        ("qwen3-moe", "shared_expert_intermediate_size", 40),
        ("qwen2-moe", "shared_expert_intermediate_size", None),
        ("mixtral", "norm_topk_prob", True),
        ("mixtral", "hidden_act", "gelu"),
        ("gpt-oss", "swiglu_limit", 9.0),
        ("gpt-oss", "experts_per_token", 3),
        ("gpt-oss", "sliding_window", None),
    ],
)
def test_other_routing_and_activations_are_refused_by_name(
    read: Read, name: str, key: str, value: Any
) -> None:
    with pytest.raises(InvalidParameter, match=rf"config\.json: {key}|num_local_experts"):
        read(name, **{key: value})


@pytest.mark.parametrize(
    ("name", "form", "named"),
    [
        ("qwen3-moe", {**AWQ, "group_size": 64}, r"layers\.0\.mlp\.experts.*GroupedScheme"),
        ("mixtral", {"quant_method": "fp8", "activation_scheme": "dynamic"}, "Fp8Scheme"),
        ("gpt-oss", QUANTIZATION, r"mlp\.experts.*Fp8Scheme"),
        ("mixtral", MXFP4, "MixtralForCausalLM has no tensors of all experts"),
        (
            "qwen3-moe",
            {**QUANTIZATION, "modules_to_not_convert": ["model.layers.2.mlp.experts.0.up_proj"]},
            r"layers\.2\.mlp\.experts.*several forms",
        ),
        ("gpt-oss", {**MXFP4, "bits": 4}, "bits"),
    ],
)
def test_other_forms_of_experts_are_refused_by_name(
    read: Read, name: str, form: dict[str, Any], named: str
) -> None:
    with pytest.raises(InvalidParameter, match=named):
        read(name, quantization_config=form)


def test_ranks_cut_experts_in_equal_parts(tmp_path: Path) -> None:
    config = json.loads((folder_of("qwen3-moe") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"moe_intermediate_size": 41}))
    with pytest.raises(InvalidParameter, match="a divisor of the model's 41 values of an expert"):
        EngineConfig.of(tmp_path, device="cpu", tensor_parallel_size=2)


@pytest.mark.parametrize("name", MOES)
def test_what_transformers_writes_is_taken(read: Read, name: str) -> None:
    """All keys of a family's own class, by their defaults."""
    import transformers

    config = getattr(transformers, f"{MOES[name][0]}Config")()
    written = json.loads(config.to_json_string(use_diff=False))
    written["architectures"] = [f"{MOES[name][0]}ForCausalLM"]
    assert read(name, **written).experts is not None


def test_a_real_config_of_gpt_oss_is_read(tmp_path: Path) -> None:
    """The keys of openai/gpt-oss-20b."""
    kinds = ["sliding_attention", "full_attention"] * 12
    config = {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "attention_dropout": 0.0,
        "eos_token_id": 200002,
        "experts_per_token": 4,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2880,
        "initial_context_length": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 2880,
        "layer_types": kinds,
        "max_position_embeddings": 131072,
        "model_type": "gpt_oss",
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "output_router_logits": False,
        "pad_token_id": 199999,
        "quantization_config": {
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
            "quant_method": "mxfp4",
        },
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "router_aux_loss_coef": 0.9,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": 201088,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    facts = check_model(tmp_path, {"device": "cpu"})
    assert facts.derived_max_len == 131072
    assert facts.quantization is not None
    assert facts.quantization.scheme("model.layers.3.mlp.experts") is not None
    for plain in ("self_attn.q_proj", "mlp.router"):
        assert facts.quantization.scheme(f"model.layers.3.{plain}") is None


def test_a_step_costs_the_chosen_experts() -> None:
    """Operations of two experts a token; bytes of the experts that uniform routes choose."""
    config = EngineConfig.of(folder_of("mixtral"), device="cpu", dtype="float32")
    costs = StepCosts(config.facts, config.layout, "float32")
    expert, attention, router = 3 * 48 * 80, 48 * 16 * (6 + 2 + 2 + 6), 48 * 6
    for tokens, read in ((1, 2.0), (2, 6 * (1 - (4 / 6) ** 2))):
        plan = SchedulerOutput(1, tuple(StepRow(SeqId(i), 0, 1) for i in range(tokens)))
        cost = costs.of(plan)
        products = 3 * (attention + router + 2 * expert)
        attended = 4 * 3 * 6 * 16
        assert cost.flops == tokens * (2 * products + attended)
        assert cost.read_bytes == pytest.approx(4 * 3 * (attention + router + read * expert))
