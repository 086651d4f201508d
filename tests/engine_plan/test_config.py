"""The engine's settings: defaults, checks, and the facts read from config.json."""

import json
from pathlib import Path
from typing import Any

import pytest

from tandem.engine.config import (
    CacheConfig,
    EngineConfig,
    ModelFacts,
    RopeFacts,
    engine_settings,
    facts_of,
    read_facts,
    structured_outputs,
)
from tandem.engine.config.engine import resolve_device
from tandem.protocol.card import KVKind
from tandem.protocol.errors import InvalidParameter

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "rope_theta": 500000.0,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}

DEFAULTS = {
    "model": None,
    "served_model_name": None,
    "dtype": "auto",
    "max_model_len": None,
    "seed": 0,
    "load_format": "auto",
    "quantization": "auto",
    "max_logprobs": 20,
    "enable_prompt_embeds": False,
    "logits_processors": (),
    "structured_outputs_backend": "guidance",
    "torch_profiler_dir": None,
    "revision": None,
    "block_size": 16,
    "num_gpu_blocks_override": None,
    "kv_cache_memory_bytes": None,
    "kv_offloading_size": None,
    "distributed_executor_backend": "auto",
    "gpu_memory_utilization": 0.9,
    "enable_prefix_caching": True,
    "kv_cache_dtype": "auto",
    "tensor_parallel_size": 1,
    "max_num_seqs": 256,
    "max_num_batched_tokens": 2048,
    "long_prefill_token_threshold": None,
    "max_itl_ms": None,
    "policy": "fcfs",
    "speculative_config": None,
    "async_scheduling": False,
    "attention_backend": "auto",
    "enforce_eager": False,
    "max_cudagraph_capture_size": None,
    "device": "auto",
}


def folder_of(tmp_path: Path, config: dict[str, Any], generation: Any = None) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    return tmp_path


def config_of(tmp_path: Path, **flat) -> EngineConfig:
    """The config of a small Llama on a CPU."""
    flat.setdefault("device", "cpu")
    return EngineConfig.of(folder_of(tmp_path, LLAMA), **flat)


def test_defaults_are_pinned():
    """A default changes only together with this table."""
    assert {each.name: each.default for each in engine_settings()} == DEFAULTS


def test_a_backend_is_refused_without_its_package(tmp_path, monkeypatch):
    """Before anything starts, and the error names what to install."""
    monkeypatch.setattr(structured_outputs, "find_spec", lambda name: None)
    with pytest.raises(InvalidParameter, match=r"install tandem-serving\[grammars\]"):
        config_of(tmp_path, structured_outputs_backend="outlines")
    assert config_of(tmp_path).structured_outputs.structured_outputs_backend == "guidance"


def test_every_setting_has_a_place():
    """Each setting has a group and a unique name; only the model must be given."""
    settings = list(engine_settings())

    assert all(each.group for each in settings)
    assert len({each.name for each in settings}) == len(settings)
    assert [each.name for each in settings if each.required] == ["model"]


def test_flat_settings_reach_their_sections(tmp_path):
    """``of`` sorts flat names into sections and resolves what depends on the model."""
    config = config_of(tmp_path, block_size=32, max_num_seqs=8, seed=3)

    assert (config.cache.block_size, config.scheduler.max_num_seqs, config.model.seed) == (32, 8, 3)
    assert config.max_model_len == 512
    assert config.dtype == config.kv_dtype == "bfloat16"
    assert config.served_model_name == tmp_path.name
    assert config.layout.groups[0].block_shape == (2, 2, 2, 32, 16)


def test_explicit_settings_win(tmp_path):
    """What the user says is taken before what the model says."""
    config = config_of(
        tmp_path, dtype="float32", kv_cache_dtype="float32", max_model_len=64, served_model_name="m"
    )

    assert (config.dtype, config.kv_dtype, config.max_model_len) == ("float32", "float32", 64)
    assert config.served_model_name == "m"


def test_kv_is_of_the_models_type(tmp_path):
    """Or codes of fp8. No kernel takes another: the first step would end the worker."""
    assert config_of(tmp_path, kv_cache_dtype="bfloat16").kv_dtype == "bfloat16"
    codes = config_of(tmp_path, kv_cache_dtype="fp8")
    assert (codes.dtype, codes.kv_dtype) == ("bfloat16", "float8_e4m3fn")
    assert codes.layout.token_bytes * 2 == config_of(tmp_path).layout.token_bytes
    with pytest.raises(InvalidParameter, match="'float16' is not allowed; auto, fp8 or bfloat16"):
        config_of(tmp_path, kv_cache_dtype="float16")
    with pytest.raises(InvalidParameter, match="auto, fp8 or float32, the model's"):
        config_of(tmp_path, kv_cache_dtype="bfloat16", dtype="float32")


def test_with_changes_one_setting(tmp_path):
    """``with_`` leaves everything else as it is."""
    config = config_of(tmp_path, max_num_seqs=4)

    changed = config.with_(block_size=64)

    assert changed.cache == CacheConfig(block_size=64)
    assert changed.scheduler == config.scheduler


def test_gpus_get_defaults_of_their_own(tmp_path):
    """On a CUDA device blocks have 64 tokens, steps 8,192 and overlap, an idle loop polls; what is
    given is kept."""
    assert config_of(tmp_path, device="cuda").cache.block_size == 64
    assert config_of(tmp_path, device="cuda", block_size=16).cache.block_size == 16
    steps = config_of(tmp_path, device="cuda").scheduler
    assert (steps.max_num_batched_tokens, steps.async_scheduling) == (8192, True)
    assert steps.idle_poll_ms == 20
    given = config_of(
        tmp_path, device="cuda", max_num_batched_tokens=512, async_scheduling=False
    ).scheduler
    assert (given.max_num_batched_tokens, given.async_scheduling) == (512, False)


def test_gpus_bound_mixed_steps_by_the_decodes_in_them(tmp_path):
    """Eight tokens for each, unless another number is given."""
    config = config_of(tmp_path, device="cuda")
    assert config.scheduler.mixed_tokens_per_decode == 8
    assert (config.scheduler.mixed_tokens(1), config.scheduler.mixed_tokens(256)) == (1024, 2048)
    given = config_of(tmp_path, device="cuda", mixed_tokens_per_decode=12).scheduler
    assert given.mixed_tokens(256) == 3072
    least = config_of(tmp_path, device="cuda", least_mixed_tokens=64).scheduler
    assert [least.mixed_tokens(n) for n in (1, 64, 256)] == [64, 512, 2048]


def test_cpus_bound_mixed_steps_by_the_decodes_in_them(tmp_path):
    """A step takes as long as it has tokens there: 64 of them, or four for each that decodes."""
    steps = config_of(tmp_path, device="cpu", max_num_batched_tokens=2048).scheduler
    assert [steps.mixed_tokens(n) for n in (1, 16, 48)] == [64, 64, 192]
    assert steps.max_num_seqs == 48


@pytest.mark.parametrize(("given", "most"), [(-1, 100), (7, 7), (5000, 100)])
def test_log_probabilities_end_with_the_vocabulary(given: int, most: int) -> None:
    """-1 is all of them, and nobody is promised more than there are."""
    config = EngineConfig.of("folder", facts=facts_of(LLAMA), device="cpu", max_logprobs=given)

    assert config.max_logprobs == most


def test_device_is_detected(monkeypatch):
    """Hidden GPUs are not there; a named device is taken as it is."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")

    assert resolve_device("auto") == "cpu"
    assert resolve_device("cuda") == "cuda"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dtype", "int8"),
        ("max_model_len", 0),
        ("max_model_len", 513),
        ("seed", -1),
        ("load_format", "pickle"),
        ("quantization", "int3"),
        ("max_logprobs", True),
        ("max_logprobs", -2),
        ("block_size", 24),
        ("block_size", 512),
        ("num_gpu_blocks_override", 0),
        ("kv_cache_memory_bytes", "1GB"),
        ("kv_offloading_size", 0),
        ("kv_offloading_size", "1GB"),
        ("gpu_memory_utilization", 0.0),
        ("gpu_memory_utilization", "half"),
        ("enable_prefix_caching", "yes"),
        ("kv_cache_dtype", "fp4"),
        ("tensor_parallel_size", 0),
        ("distributed_executor_backend", "ray"),
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", 1.5),
        ("long_prefill_token_threshold", 0),
        ("lone_prefill_token_threshold", 0),
        ("max_num_begun_tokens", 0),
        ("mixed_tokens_per_decode", 1),
        ("least_mixed_tokens", 0),
        ("max_itl_ms", 0),
        ("policy", "random"),
        ("max_num_queued_reqs", -1),
        ("replay_check_tokens", -1),
        ("replay_check_tokens", 129),
        ("watermark", 1.5),
        ("watermark", float("nan")),
        ("async_scheduling", 1),
        ("idle_poll_ms", -1),
        ("idle_poll_ms", 1001),
        ("idle_poll_ms", 2.5),
        ("structured_outputs_backend", "auto"),
        ("device", "tpu"),
        ("no_such_setting", 1),
    ],
)
def test_bad_settings_name_the_field(tmp_path, name, value):
    """A value that is not allowed is an InvalidParameter of that name."""
    with pytest.raises(InvalidParameter) as caught:
        config_of(tmp_path, **{name: value})

    assert caught.value.param == name


def test_model_must_be_named():
    """An empty model path is refused."""
    with pytest.raises(InvalidParameter, match="model"):
        EngineConfig.of("", facts=facts_of(LLAMA))


def test_old_and_new_rope_spellings_agree():
    """transformers 4 and 5 spell the same rotary embedding differently."""
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    old = facts_of({**LLAMA, "rope_scaling": {"rope_type": "llama3", **scaling}})
    bare = {key: value for key, value in LLAMA.items() if key != "rope_theta"}
    new = facts_of(
        {**bare, "rope_parameters": {"rope_theta": 500000.0, "rope_type": "llama3", **scaling}}
    )

    assert old.rope == new.rope == RopeFacts(theta=500000.0, kind="llama3", scaling=scaling)
    assert old.derived_max_len == 512


@pytest.mark.parametrize(
    ("scaling", "length"),
    [
        (None, 512),
        ({"type": "linear", "factor": 2.0}, 1024),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024),
        ({"type": "yarn", "factor": 1.0, "original_max_position_embeddings": 256}, 512),
        ({"type": "yarn", "factor": None, "original_max_position_embeddings": 256}, 512),
    ],
)
def test_rope_scaling_lengthens_the_context(scaling, length):
    """The context is what the scaled positions allow."""
    assert facts_of({**LLAMA, "rope_scaling": scaling}).derived_max_len == length


def test_families_have_their_biases():
    """Qwen2 has a bias on q, k, v alone; Qwen3 a norm per head and a head of 128."""
    qwen2 = facts_of({**LLAMA, "architectures": ["Qwen2ForCausalLM"], "sliding_window": 64})
    qwen3 = facts_of({**LLAMA, "architectures": ["Qwen3ForCausalLM"], "head_dim": None})
    biased = facts_of({**LLAMA, "attention_bias": True, "mlp_bias": True})

    assert (qwen2.attention_bias, qwen2.attention_output_bias, qwen2.qk_norm) == (
        True,
        False,
        False,
    )
    assert qwen2.sliding_window is None
    assert (qwen3.attention_bias, qwen3.qk_norm, qwen3.head_dim) == (False, True, 128)
    assert (biased.attention_bias, biased.attention_output_bias, biased.mlp_bias) == (True,) * 3


FULL, WINDOW = KVKind.FULL, KVKind.WINDOW
SLIDING = {"use_sliding_window": True, "sliding_window": 64}


@pytest.mark.parametrize(
    ("architecture", "change", "window", "kinds"),
    [
        ("Mistral", {"sliding_window": 64}, 64, [WINDOW] * 2),
        ("Mistral", {"sliding_window": None}, None, [FULL] * 2),
        ("Mistral", {}, 4096, [WINDOW] * 2),
        ("Mistral", {"sliding_window": 64, "layer_types": ["sliding_attention"] * 2}, 64, None),
        ("Qwen2", {"sliding_window": 64}, None, [FULL] * 2),
        ("Qwen2", {"use_sliding_window": True}, None, [FULL] * 2),
        ("Qwen2", {"use_sliding_window": True, "max_window_layers": 0}, 4096, [WINDOW] * 2),
        ("Qwen2", {**SLIDING, "sliding_window": None, "max_window_layers": 0}, None, [FULL] * 2),
        ("Qwen3", {**SLIDING, "max_window_layers": 1}, 64, [FULL, WINDOW]),
        ("Qwen3", {**SLIDING, "layer_types": ["sliding_attention", "full_attention"]}, 64, None),
        ("Llama", {"sliding_window": 512}, None, [FULL] * 2),
    ],
)
def test_windows_are_those_of_config_json(tmp_path, architecture, change, window, kinds):
    """A window bounds what a query attends to, and not the context."""
    config = {**LLAMA, **change, "architectures": [f"{architecture}ForCausalLM"]}
    facts = facts_of(config)
    words = {"full_attention": FULL, "sliding_attention": WINDOW}
    kinds = kinds or [words[each] for each in change["layer_types"]]
    assert (facts.sliding_window, list(facts.kinds)) == (window, kinds)
    folder = folder_of(tmp_path, config)
    assert EngineConfig.of(folder, device="cpu").max_model_len == 512


@pytest.mark.parametrize(
    ("architecture", "change"),
    [
        ("Mistral", {"sliding_window": 0}),
        ("Mistral", {"layer_types": ["sliding_attention", "full_attention"]}),
        ("Mistral", {"layer_types": ["full_attention"], "sliding_window": None}),
        ("Qwen2", {"sliding_window": True, "use_sliding_window": True}),
        ("Qwen2", {"max_window_layers": None, "use_sliding_window": True, "sliding_window": 64}),
        ("Qwen3", {"layer_types": ["linear_attention", "full_attention"]}),
        ("Llama", {"sliding_window": 64}),
        ("Llama", {"layer_types": ["full_attention", "sliding_attention"]}),
    ],
)
def test_windows_that_layers_do_not_compute_are_refused(architecture, change):
    config = {**LLAMA, **change, "architectures": [f"{architecture}ForCausalLM"]}
    with pytest.raises(InvalidParameter, match=rf"config\.json: {next(iter(change))}"):
        facts_of(config)


def test_generation_config_names_the_end(tmp_path):
    """The chat turn's end in generation_config goes before config.json's id."""
    assert read_facts(folder_of(tmp_path, LLAMA)).eos_token_ids == (2,)
    folder = folder_of(tmp_path, LLAMA, {"eos_token_id": [5, 6]})
    assert read_facts(folder).eos_token_ids == (5, 6)
    without = {key: value for key, value in LLAMA.items() if key != "eos_token_id"}
    assert facts_of(without).eos_token_ids == ()


@pytest.mark.parametrize(
    "change",
    [
        {"architectures": []},
        {"num_hidden_layers": None},
        {"num_key_value_heads": 3},
        {"hidden_size": 66},
        {"vocab_size": True},
        {"rope_theta": -1.0},
        {"rms_norm_eps": None},
        {"partial_rotary_factor": None},
        {"rope_parameters": {"rope_theta": None}},
        {"is_causal": False},
    ],
)
def test_wrong_facts_are_named(change):
    """A config.json that cannot be right is refused with the field's name."""
    with pytest.raises(InvalidParameter, match=next(iter(change))):
        facts_of({**LLAMA, **change})


def test_decoders_that_say_they_are_causal_are_taken():
    """The key alone is no reason to refuse; encoders see both ways anyhow."""
    for said in (True, None):
        assert facts_of({**LLAMA, "is_causal": said}) == facts_of(LLAMA)
    assert facts_of({**LLAMA, "architectures": ["BertModel"], "is_causal": False}).encoder


def test_folders_without_a_config_are_refused(tmp_path):
    """A path that holds no model says what a model's folder holds."""
    with pytest.raises(InvalidParameter, match=r"config\.json"):
        EngineConfig.of(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InvalidParameter, match="valid JSON"):
        read_facts(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(InvalidParameter, match="JSON object"):
        read_facts(tmp_path)


def test_missing_kv_heads_mean_one_per_head():
    """Without num_key_value_heads every head has its own KV."""
    bare = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}

    assert facts_of(bare).num_kv_heads == 4
    assert isinstance(facts_of({**bare, "head_dim": 8}), ModelFacts)
