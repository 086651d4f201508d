"""Forms of weights that config.json or a tool's file states: which layer has which, and refusals
by key."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.engine_run.form_configs import (
    AWQ,
    FLOAT4,
    FLOAT8,
    FP8_BLOCKS,
    FP8_STATIC,
    FP8_TOKEN,
    INT8,
    acts,
    compressed_config,
    gptq_config,
    packed_config,
)

from tandem.engine.config.quantization import (
    Fp4Kind,
    Fp4Scheme,
    Fp8Scheme,
    Granularity,
    GroupedScheme,
    Int8Scheme,
    Packing,
    quantization_of,
    with_tool_file,
)
from tandem.protocol.errors import InvalidParameter

UP = "model.layers.3.mlp.up_proj"
GPTQ = gptq_config(bits=4, group_size=128, sym=True, desc_act=False)
FLOATS = compressed_config("float-quantized", {**FLOAT8, "strategy": "channel"}, FP8_TOKEN)
INTS = compressed_config(
    "int-quantized", {**INT8, "strategy": "channel"}, acts(8, "int", strategy="token")
)
PACKED = packed_config(4, 128, True)
MX = compressed_config("mxfp4-pack-quantized", {**FLOAT4, "strategy": "group", "group_size": 32})
NV = compressed_config(
    "nvfp4-pack-quantized", {**FLOAT4, "strategy": "tensor_group", "group_size": 16}
)
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head"]}
_PART = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
MODELOPT_GROUPS = {"group_0": {"weights": _PART, "input_activations": _PART, "targets": ["Linear"]}}


def grouped(*values: Any) -> GroupedScheme:
    return GroupedScheme(*values)


@pytest.mark.parametrize(
    ("config", "scheme"),
    [
        (FP8_BLOCKS, Fp8Scheme(Granularity.BLOCK)),
        (FP8_BLOCKS | {"weight_block_size": None}, Fp8Scheme(Granularity.TENSOR)),
        ({"quant_method": "fbgemm_fp8"}, Fp8Scheme(Granularity.CHANNEL)),
        (FLOATS, Fp8Scheme(Granularity.CHANNEL)),
        (
            FLOATS | {"kv_cache_scheme": {**FLOAT8, "dynamic": False, "strategy": "tensor"}},
            Fp8Scheme(Granularity.CHANNEL),
        ),
        (MODELOPT, Fp8Scheme(Granularity.TENSOR)),
        (MODELOPT | {"quant_algo": "NVFP4"}, Fp4Scheme(Fp4Kind.NV_MODELOPT)),
        (
            {
                "quant_method": "modelopt",
                "quant_algo": "NVFP4",
                "config_groups": MODELOPT_GROUPS,
                "ignore": ["lm_head"],
                "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
                "producer": {"name": "modelopt", "version": "0.40"},
            },
            Fp4Scheme(Fp4Kind.NV_MODELOPT),
        ),
        (INTS, Int8Scheme(Granularity.CHANNEL)),
        (AWQ | {"group_size": 64}, grouped(4, 64, False, False, Packing.AWQ)),
        (GPTQ, grouped(4, 128, True, False, Packing.GPTQ)),
        (
            GPTQ | {"format": "gptq_v2", "group_size": -1},
            grouped(4, None, True, False, Packing.GPTQ_V2),
        ),
        (GPTQ | {"bits": 8, "desc_act": True}, grouped(8, 128, True, True, Packing.GPTQ)),
        (packed_config(8, -1, False), grouped(8, None, False, False, Packing.COMPRESSED)),
        (MX, Fp4Scheme(Fp4Kind.MX)),
        (NV, Fp4Scheme(Fp4Kind.NV)),
    ],
)
def test_a_layer_has_the_scheme_of_its_config(config, scheme):
    for name in ("quantization_config", "compression_config"):
        facts = quantization_of({name: config, "tie_word_embeddings": False})
        assert facts is not None
        assert facts.scheme(UP) == scheme
    assert quantization_of({"quantization_config": None}) is None


def group_of(config: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = config["config_groups"]["group_0"]
    return found


def with_group(config: dict[str, Any], part: str | None = None, **more: Any) -> dict[str, Any]:
    """The config with keys of its group, or of the group's weights or activations, changed."""
    copied: dict[str, Any] = json.loads(json.dumps(config))
    changed = group_of(copied) if part is None else group_of(copied)[part]
    changed.update(more)
    return copied


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"quant_method": "bitsandbytes"}, r"quant_method: 'bitsandbytes'.*fp8.*nearest"),
        ({}, "quant_method"),
        (FP8_BLOCKS | {"weight_block_size": [64, 128]}, r"weight_block_size.*\[128, 128\]"),
        (FP8_BLOCKS | {"activation_scheme": "static"}, "activation_scheme.*static.*dynamic"),
        (FP8_BLOCKS | {"activation_scheme": None}, "activation_scheme.*dynamic, static"),
        (FP8_BLOCKS | {"fmt": "e5m2"}, "fmt.*e5m2.*e4m3"),
        (FP8_BLOCKS | {"scale_fmt": "int"}, "scale_fmt.*int.*float"),
        (FP8_BLOCKS | {"expert_dtype": "fp4"}, "expert_dtype.*fp4.*fp8"),
        (FP8_BLOCKS | {"modules_to_not_convert": "lm_head"}, "modules_to_not_convert"),
        (FP8_BLOCKS | {"modules_to_not_convert": ["re:("]}, "modules_to_not_convert.*expressions"),
        (FP8_BLOCKS | {"rotation": 3}, "rotation: 3 is not allowed; only"),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": "high"}, "activation_scale_ub"),
        (AWQ, "group_size: None.*32, 64, 128, -1"),
        (AWQ | {"group_size": 16}, "group_size: 16"),
        (AWQ | {"group_size": 64, "version": "gemv"}, "version: 'gemv'.*gemm"),
        (AWQ | {"group_size": 64, "bits": 3}, "bits: 3.*4"),
        (AWQ | {"group_size": 64, "zero_point": False}, "zero_point: False.*True"),
        (GPTQ | {"bits": 2}, "bits: 2.*4, 8"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format: 'marlin'"),
        (GPTQ | {"lm_head": True}, "lm_head: True"),
        (GPTQ | {"sym": "yes"}, "sym: 'yes'"),
        (GPTQ | {"dynamic": {"+:.*": {"bits": 8}}}, "dynamic.*left plain"),
        (GPTQ | {"rotation": "hadamard"}, "rotation"),
        (FLOATS | {"kv_cache_scheme": {"num_bits": 4}}, r"kv_cache_scheme\.num_bits: 4"),
        (FLOATS | {"kv_cache_scheme": INT8}, r"kv_cache_scheme\.type: 'int'.*float"),
        (FLOATS | {"sparsity_config": {"format": "sparse-24-bitmask"}}, r"sparsity_config\.format"),
        (FLOATS | {"transform_config": {"config_groups": {"u": {}}}}, "transform_config"),
        (FLOATS | {"format": "marlin-24"}, "format: 'marlin-24'"),
        (FLOATS | {"format": "mixed-precision"}, r"group_0\.format"),
        (FLOATS | {"config_groups": {}}, "config_groups"),
        (FLOATS | {"config_groups": ["a"]}, "config_groups.*an object"),
        (FLOATS | {"ignore": []}, r"ignore: \[\] is not allowed.*lm_head"),
        (with_group(FLOATS, targets=["Embedding"]), "targets.*Linear"),
        (with_group(FLOATS, output_activations={"num_bits": 8}), "output_activations"),
        (with_group(FLOATS, "weights", strategy="group"), "weights.strategy: 'group'"),
        (with_group(FLOATS, "weights", type="int"), "weights.type: 'int'.*float"),
        (with_group(FLOATS, "weights", num_bits=4), "weights.num_bits: 4"),
        (with_group(FLOATS, "input_activations", dynamic=False), "input_activations.strategy"),
        (with_group(INTS, "input_activations", dynamic=False), "input_activations.dynamic: False"),
        (with_group(INTS, "input_activations", symmetric=False), "symmetric: False"),
        (with_group(INTS, input_activations=None), "input_activations: None.*an object"),
        (with_group(PACKED, input_activations=acts(8, "int")), "input_activations.*leave it out"),
        (with_group(PACKED, "weights", num_bits=3), "weights.num_bits: 3.*4, 8"),
        (with_group(PACKED, "weights", group_size=48), "weights.group_size: 48"),
        (with_group(PACKED, "weights", actorder="block"), "weights.actorder: 'block'"),
        (with_group(PACKED, "weights", rotated=True), r"weights\.rotated: True"),
        (with_group(MX, "weights", group_size=16), "weights.group_size: 16.*32"),
        (with_group(NV, "weights", group_size=32), "weights.group_size: 32.*16"),
        (MODELOPT | {"quant_algo": "W4A16_AWQ"}, "quant_algo: 'W4A16_AWQ'.*FP8, NVFP4"),
        (MODELOPT | {"kv_cache_quant_algo": "INT8"}, "kv_cache_quant_algo: 'INT8'.*FP8"),
        (MODELOPT | {"exclude_modules": []}, r"exclude_modules: \[\].*lm_head"),
        (MODELOPT | {"config_groups": MODELOPT_GROUPS}, r"weights\.num_bits: 4.*8"),
    ],
)
def test_other_keys_and_values_are_refused_by_name(config, named):
    """Before anything is read but config.json."""
    with pytest.raises(InvalidParameter, match=f"quantization_config.*{named}"):
        quantization_of({"quantization_config": config, "architectures": ["LlamaForCausalLM"]})


@pytest.mark.parametrize(
    ("name", "content", "scheme"),
    [
        (
            "quantize_config.json",
            {"bits": 4, "group_size": 128, "desc_act": True, "sym": True, "damp_percent": 0.01},
            grouped(4, 128, True, True, Packing.GPTQ),
        ),
        (
            "quant_config.json",
            {"zero_point": True, "q_group_size": 128, "w_bit": 4, "version": "GEMM"},
            grouped(4, 128, False, False, Packing.AWQ),
        ),
        (
            "hf_quant_config.json",
            {
                "producer": {"name": "modelopt", "version": "0.29"},
                "quantization": {
                    "quant_algo": "NVFP4",
                    "kv_cache_quant_algo": "FP8",
                    "group_size": 16,
                    "exclude_modules": ["lm_head", "*self_attn*"],
                },
            },
            Fp4Scheme(Fp4Kind.NV_MODELOPT),
        ),
    ],
)
def test_a_tool_s_own_file_states_the_form(tmp_path: Path, name, content, scheme):
    """Unless config.json does."""
    (tmp_path / name).write_text(json.dumps(content))
    facts = quantization_of(with_tool_file({}, tmp_path))
    assert facts is not None
    assert facts.scheme(UP) == scheme
    if name.startswith("hf"):
        assert facts.unapplied == ("input_scale", "k_scale", "v_scale")
        assert facts.scheme("model.layers.0.self_attn.q_proj") is None
    stated = {"quantization_config": FP8_BLOCKS}
    assert with_tool_file(stated, tmp_path) is stated
    (tmp_path / name).write_text("{}")
    with pytest.raises(InvalidParameter, match=f"{name}"):
        quantization_of(with_tool_file({}, tmp_path))


def schemes_of(config: dict[str, Any], *layers: str) -> list[bool]:
    """Whether each layer is of the config's form, and not plain."""
    facts = quantization_of({"quantization_config": config})
    assert facts is not None
    return [facts.scheme(each) is not None for each in layers]


def test_layers_left_plain_follow_the_tool_s_own_rules():
    """Names, parts of names, expressions, suffixes, wildcards, and several groups."""
    other = "model.layers.13.mlp.up_proj"
    kept = FP8_BLOCKS | {"modules_to_not_convert": ["model.layers.3", "re:.*13.mlp", "k_proj"]}
    layers = (UP, other, "model.layers.30.mlp.up_proj", "model.layers.1.self_attn.k_proj")
    assert schemes_of(kept, *layers) == [False, False, True, False]
    dynamic = GPTQ | {"dynamic": {r"-:model\.layers\.3\.": {}}}
    assert schemes_of(dynamic, UP, other) == [False, True]
    inside = GPTQ | {"modules_in_block_to_quantize": [["mlp.up_proj"], ["self_attn.q_proj"]]}
    assert schemes_of(inside, UP, "model.layers.3.mlp.down_proj") == [True, False]
    ignored = FLOATS | {"ignore": ["lm_head", "re:.*layers.3.mlp.*"]}
    assert schemes_of(ignored, UP, other, "lm_head") == [False, True, False]
    excluded = MODELOPT | {"exclude_modules": ["model.layers.3*", "lm_head"]}
    assert schemes_of(excluded, UP, other) == [False, True]
    named = with_group(FLOATS, targets=[UP])
    assert schemes_of(named, UP, other) == [True, False]
    both = FLOATS | {"format": "mixed-precision"}
    both["config_groups"] = {
        "all": group_of(FLOATS) | {"format": "float-quantized"},
        "some": group_of(PACKED) | {"format": "pack-quantized", "targets": ["re:.*up_proj$"]},
    }
    facts = quantization_of({"quantization_config": both})
    assert facts is not None
    assert isinstance(facts.scheme(UP), GroupedScheme)
    assert isinstance(facts.scheme("model.layers.3.mlp.down_proj"), Fp8Scheme)


def test_scales_of_activations_that_are_not_applied_are_named():
    for config, names in (
        (FP8_BLOCKS, ()),
        (
            {"quant_method": "fp8", "activation_scheme": "static"},
            ("input_scale", "activation_scale"),
        ),
        (with_group(FLOATS, input_activations=FP8_STATIC), ("input_scale",)),
        (MODELOPT, ("input_scale",)),
    ):
        facts = quantization_of({"quantization_config": config})
        assert facts is not None
        assert facts.unapplied == names
