import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.hub.conftest import VOCAB, blocks_of

from tandem.hub import UnsupportedModel, prepare
from tandem.hub.gguf import tensors as weights_of
from tandem.hub.gguf.config import _llama3_factors
from tandem.hub.gguf.reader import GgufModel

Build = Callable[..., Path]


@pytest.fixture
def converted(gguf_file: Build, tmp_path: Path) -> Callable[..., Path]:
    """Builds a GGUF file and returns the folder that it becomes."""

    def convert(*args: Any, **kwargs: Any) -> Path:
        return prepare(str(gguf_file(*args, **kwargs)), cache_dir=tmp_path / "cache").path

    return convert


def stored(path: Path) -> dict[str, np.ndarray]:
    """A file's values in float32 by llama.cpp's names, as the file orders them."""
    return {name: tensor.rows() for name, tensor in GgufModel(path).tensors().items()}


def to_llama_cpp(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows as llama.cpp's own converter orders them: halves of a head become pairs."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def test_values_and_names(gguf_file: Build, converted: Build):
    """Every tensor arrives under transformers' name with its very values."""
    weights = load_file(converted() / "model.safetensors")
    source = stored(gguf_file())
    assert len(weights) == len(source)
    for ours, theirs in {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "model.layers.0.input_layernorm.weight": "blk.0.attn_norm.weight",
        "model.layers.0.self_attn.v_proj.weight": "blk.0.attn_v.weight",
        "model.layers.0.self_attn.o_proj.weight": "blk.0.attn_output.weight",
        "model.layers.0.post_attention_layernorm.weight": "blk.0.ffn_norm.weight",
        "model.layers.0.mlp.gate_proj.weight": "blk.0.ffn_gate.weight",
        "model.layers.0.mlp.up_proj.weight": "blk.0.ffn_up.weight",
        "model.layers.0.mlp.down_proj.weight": "blk.0.ffn_down.weight",
    }.items():
        assert np.array_equal(weights[ours].numpy(), source[theirs]), ours


@pytest.mark.parametrize(("part", "heads"), [("q", 4), ("k", 2)])
def test_rotary_rows_of_llama_are_put_back(
    gguf_file: Build, converted: Build, part: str, heads: int
):
    """Ordering the converted q and k rows as llama.cpp does gives the file's rows again."""
    weights = load_file(converted("llama") / "model.safetensors")
    ours = weights[f"model.layers.0.self_attn.{part}_proj.weight"].numpy()
    theirs = stored(gguf_file("llama"))[f"blk.0.attn_{part}.weight"]
    assert not np.array_equal(ours, theirs)
    assert np.array_equal(to_llama_cpp(ours, heads), theirs)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_rows_of_qwen_stay(gguf_file: Build, converted: Build, family: str):
    """Qwen's files hold q and k, their biases and their norms in transformers' order."""
    weights = load_file(converted(family) / "model.safetensors")
    source = stored(gguf_file(family))
    for name, values in source.items():
        found = weights_of.transformers_name(name)
        assert found is not None
        assert np.array_equal(weights[found].numpy(), values), name


@pytest.mark.parametrize("kind", sorted(weights_of.PACKED))
def test_blocks_are_the_bytes_of_the_file(gguf_file: Build, converted: Build, kind: str):
    """Only the order of a head's rows changes. config.json has the kind of each layer."""
    blocks = GgufModel(gguf_file(**blocks_of(kind))).tensors()
    folder = converted(**blocks_of(kind))
    weights = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    assert config["dtype"] == "float32"
    packed = [name for name, tensor in blocks.items() if len(tensor.shape) == 2]
    names = {name: weights_of.transformers_name(name) or "" for name in packed}
    layers = sorted(each.removesuffix(".weight") for each in names.values())
    form = config["quantization_config"]
    assert form["quant_method"] == "gguf"
    assert {each: sorted(of) for each, of in form["kinds"].items()} == {kind: layers}
    for theirs, ours in names.items():
        rows = weights[ours].numpy()
        heads = {"q": 4, "k": 2}.get(theirs[11:12]) if ".attn_" in theirs else None
        rows = rows if heads is None else to_llama_cpp(rows, heads)
        assert np.array_equal(rows, blocks[theirs].data), theirs
    assert weights["model.norm.weight"].dtype == torch.float32


def test_a_head_of_another_kind_is_named_with_its_kind(converted: Build):
    head = np.ones((10, 32), np.float32)
    kinds = {"output.weight": "Q8_0", "blk.0.attn_v.weight": "F16"}
    folder = converted(kind="Q4_0", kinds=kinds, tensors={"output.weight": head})
    form = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert form["kinds"]["Q8_0"] == ["lm_head"]
    value = "model.layers.0.self_attn.v_proj"
    assert value not in form["kinds"]["Q4_0"]
    assert load_file(folder / "model.safetensors")[f"{value}.weight"].dtype == torch.float16


def test_other_kinds_are_dequantized(
    gguf_file: Build, converted: Build, monkeypatch: pytest.MonkeyPatch
):
    """A small model becomes float32, value for value; one over the limit becomes bfloat16, rounded
    to nearest as torch rounds."""
    monkeypatch.setattr(weights_of, "PACKED", frozenset())
    expected = torch.from_numpy(stored(gguf_file(kind="Q4_1"))["blk.0.ffn_up.weight"].copy())
    for dtype in (torch.float32, torch.bfloat16):
        folder = converted(kind="Q4_1")
        assert "quantization_config" not in json.loads((folder / "config.json").read_text())
        weights = load_file(folder / "model.safetensors")
        assert torch.equal(weights["model.layers.0.mlp.up_proj.weight"], expected.to(dtype))
        monkeypatch.setattr(weights_of, "EXACT_LIMIT_BYTES", 1)
        shutil.rmtree(folder.parent)


@pytest.mark.parametrize(("kind", "dtype"), [("F16", "float16"), ("BF16", "bfloat16")])
def test_plain_types_stay(gguf_file: Build, converted: Build, kind: str, dtype: str):
    """The model's type is that of its matrices; norms keep their own."""
    folder = converted(kind=kind)
    assert json.loads((folder / "config.json").read_text())["dtype"] == dtype
    weights = load_file(folder / "model.safetensors")
    for name, values in stored(gguf_file(kind=kind)).items():
        if ".attn_q." not in name and ".attn_k." not in name:
            expected = torch.from_numpy(values.copy())
            expected = expected.to(getattr(torch, dtype)) if values.ndim > 1 else expected
            assert torch.equal(weights[weights_of.transformers_name(name) or ""], expected), name


def test_shards_and_their_index(converted: Build, monkeypatch: pytest.MonkeyPatch):
    """A model over the size of one file is split, and the index finds every tensor."""
    monkeypatch.setattr(weights_of, "SHARD_BYTES", 10_000)
    folder = converted()
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) > 1
    for name, file in index.items():
        assert name in load_file(folder / file)


def test_config(converted: Build):
    """Shapes, rotary base and special tokens come from the file's keys."""
    folder = converted("qwen3")
    config = json.loads((folder / "config.json").read_text())
    expected = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 10,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rope_theta": 10000.0,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "tie_word_embeddings": True,
        "eos_token_id": 0,
    }
    assert {key: config.get(key) for key in expected} == expected
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation == {"eos_token_id": 0}


def ends_of(folder: Path) -> list[int] | int:
    ends: list[int] | int = json.loads((folder / "generation_config.json").read_text())[
        "eos_token_id"
    ]
    return ends


def test_end_of_turn_also_ends(converted: Build):
    """A file with tokens for the end of a turn and of a message has three ids that end a text."""
    named = {"tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.eom_token_id": 7}
    assert ends_of(converted(extra=named)) == [0, 5, 7]


def test_control_tokens_end_by_what_they_are_called(converted: Build):
    """Qwen's files have two ends and name one; what is no control token is none, nor is one that
    stands between texts where nothing begins with it, as SmolLM2's."""
    tokens = ["<|im_end|>", "<|endoftext|>", "<|im_start|>", "<|eot_id|>", *VOCAB[4:]]
    kinds = [3, 3, 3, 4, *[1] * (len(VOCAB) - 4)]
    keys = {"tokens": tokens, "token_type": kinds, "bos_token_id": 1, "padding_token_id": 1}
    keys |= {"merges": ["Ġ Ġ"]}
    named = {f"tokenizer.ggml.{key}": to for key, to in keys.items()}
    assert ends_of(converted("qwen2", extra=named)) == [0, 1]
    for key in ("bos", "padding"):
        del named[f"tokenizer.ggml.{key}_token_id"]
    assert ends_of(converted("qwen2", extra=named)) == 0


def test_untied_output(gguf_file: Build, converted: Build):
    """A file with an output matrix becomes a model with an untied head."""
    head = np.ones((10, 32), np.float32)
    folder = converted(tensors={"output.weight": head})
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is False
    assert np.array_equal(load_file(folder / "model.safetensors")["lm_head.weight"].numpy(), head)


def test_mistral_is_a_llama_with_a_window(converted: Build):
    """A llama file with a sliding window is Mistral to transformers."""
    config = converted(extra={"llama.attention.sliding_window": 64}) / "config.json"
    assert json.loads(config.read_text())["architectures"] == ["MistralForCausalLM"]


def test_llama3_scaling_is_recognised(converted: Build):
    """Per-frequency factors of Llama 3 are told as the settings that they were computed from."""
    factors = _llama3_factors(10000.0, 8, 32.0).astype(np.float32)
    config = converted(tensors={"rope_freqs.weight": factors}) / "config.json"
    rope = json.loads(config.read_text())["rope_parameters"]
    assert rope["rope_type"] == "llama3"
    assert rope["factor"] == 32.0


def test_llama3_factors_match_transformers():
    """The factors are those by which transformers' Llama 3.1 divides its frequencies."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(head_dim=128, hidden_size=256, num_attention_heads=2, rope_parameters=rope)
    theirs, _ = ROPE_INIT_FUNCTIONS["llama3"](config, device=torch.device("cpu"))
    plain = 500000.0 ** (-np.arange(0, 128, 2) / 128)
    np.testing.assert_allclose(plain / theirs.numpy(), _llama3_factors(5e5, 128, 8.0), rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        ({"extra": {"llama.rope.scaling.type": "longrope"}}, "'linear' and 'yarn' are allowed"),
        ({"tensors": {"rope_freqs.weight": np.full(4, 3.0, np.float32)}}, "fit no llama3 setting"),
        ({"tensors": {"blk.0.ssm_in.weight": np.ones((2, 32), np.float32)}}, "blk.0.ssm_in.weight"),
        ({"without": ("llama.block_count",)}, "lacks the key llama.block_count"),
        ({"extra": {"split.count": 3}}, "one of 3 parts"),
        ({"extra": {"tokenizer.ggml.model": "bert"}}, "'gpt2' .* and 'llama' .* are allowed"),
        ({"extra": {"tokenizer.ggml.model": "llama"}}, "add_space_prefix True; false is allowed"),
        ({"extra": {"tokenizer.ggml.pre": "odd"}}, "'odd'; .*'qwen2'"),
    ],
)
def test_refusals_name_what_is_there(gguf_file: Build, tmp_path: Path, change: Any, hint: str):
    """What cannot be converted is named with what is allowed, and leaves no cache entry."""
    with pytest.raises(UnsupportedModel, match=hint):
        prepare(str(gguf_file(**change)), cache_dir=tmp_path / "cache")
    assert not [
        path for path in (tmp_path / "cache").rglob("*") if path.is_dir() and "tiny" in path.name
    ]


def test_other_architecture(gguf_file: Build, tmp_path: Path):
    """A family that cannot be converted is named, with those that can."""
    with pytest.raises(UnsupportedModel, match=r"'gemma2'; .*'gemma3', 'llama', 'qwen2'"):
        prepare(str(gguf_file("gemma2")), cache_dir=tmp_path / "cache")


def test_not_gguf_inside(tmp_path: Path):
    """A file that only has the name is refused."""
    file = tmp_path / "m.gguf"
    file.write_bytes(b"nothing of the kind, but long enough to be read as a header")
    with pytest.raises(UnsupportedModel, match="not a GGUF file: it begins with"):
        prepare(str(file), cache_dir=tmp_path / "cache")


def test_described_only(gguf_file: Build, tmp_path: Path):
    """Without weights a GGUF file becomes config and tokenizer, apart from the whole entry."""
    source = str(gguf_file())
    described = prepare(source, cache_dir=tmp_path / "cache", weights=False).path
    whole = prepare(source, cache_dir=tmp_path / "cache").path
    assert described != whole
    assert (described / "tokenizer.json").is_file()
    assert not list(described.glob("*.safetensors"))
