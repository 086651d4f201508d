"""Keys of a GGUF file that change numbers are followed, or the file is refused by their name."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tandem.hub import UnsupportedModel
from tandem.hub.gguf.convert import convert

Build = Callable[..., Path]


@pytest.fixture
def converted(gguf_file: Build, tmp_path: Path) -> Callable[..., Path]:
    """A folder made of a file with more keys."""

    def build(family: str = "llama", **extra: Any) -> Path:
        keys = {key.replace("__", "."): value for key, value in extra.items()}
        folder = tmp_path / "made"
        folder.mkdir(exist_ok=True)
        convert(gguf_file(family, extra=keys), folder, progress=False)
        return folder

    return build


def _rope(folder: Path) -> dict[str, Any]:
    rope: dict[str, Any] = json.loads((folder / "config.json").read_text())["rope_parameters"]
    return rope


@pytest.mark.parametrize(
    "key",
    [
        "attention.scale",
        "attention.clamp_kqv",
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "logit_scale",
        "residual_scale",
        "embedding_scale",
        "attention.temperature_scale",
        "rope.scaling.yarn_ext_factor",
        "rope.scaling.yarn_log_multiplier",
        "rope.dimension_count",
        "attention.value_length",
        "rope.scale_linear",
        "expert_count",
        "a.number.of.tomorrow",
    ],
)
def test_a_key_that_changes_numbers_is_refused_by_its_name(converted: Build, key: str):
    """With its value: passed over, the model would answer otherwise than it was made to."""
    with pytest.raises(UnsupportedModel, match=rf"llama\.{key} 3(\.0)?; .*(is|key is) allowed"):
        converted(**{f"llama.{key}": 3})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.attention.scale", 8**-0.5),
        ("llama.logit_scale", 1.0),
        ("llama.final_logit_softcapping", 0.0),
        ("llama.rope.dimension_count", 8),
        ("llama.attention.value_length", 8),
        ("llama.attention.causal", True),
        ("llama.expert_count", 0),
        ("llama.vocab_size", 10),
        ("llama.rope.scaling.finetuned", True),
        ("general.name", "n"),
        ("general.file_type", 7),
        ("quantize.imatrix.file", "a.dat"),
        ("somebody.note", 3),
        ("tokenizer.ggml.add_space_prefix", False),
        ("tokenizer.ggml.fim_pre_token_id", 3),
        ("tokenizer.chat_template.tool_use", "x"),
    ],
)
def test_a_key_that_changes_nothing_is_taken(converted: Build, key: str, value: Any):
    assert (converted(**{key: value}) / "config.json").is_file()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tokenizer.ggml.add_space_prefix", True),
        ("tokenizer.ggml.add_sep_token", True),
        ("tokenizer.ggml.remove_extra_whitespaces", True),
        ("tokenizer.ggml.precompiled_charsmap", [1, 2]),
        ("tokenizer.ggml.something_new", 1),
        ("llama.attention.causal", False),
        ("general.type", "adapter"),
        ("qwen2.attention.sliding_window", 64),
    ],
)
def test_what_makes_other_tokens_or_layers_is_refused(converted: Build, key: str, value: Any):
    """Flags of tokenizers, adapters, windows that a family's layers do not use."""
    family = "qwen2" if key.startswith("qwen2") else "llama"
    with pytest.raises(UnsupportedModel, match=key):
        converted(family, **{key: value})


def test_yarn_is_followed_with_all_of_its_factors(converted: Build):
    """In transformers' words: its attention factor replaces what a file's multiplies."""
    scaling = {"type": "yarn", "factor": 4.0, "original_context_length": 32, "attn_factor": 0.5}
    scaling |= {"yarn_beta_fast": 16.0, "yarn_beta_slow": 2.0}
    rope = _rope(converted(**{f"llama.rope.scaling.{key}": each for key, each in scaling.items()}))
    assert rope.pop("attention_factor") == pytest.approx(0.5 * (0.1 * math.log(4) + 1))
    assert rope == {
        "rope_theta": 10000.0,
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
    }


@pytest.mark.parametrize("begins", [False, True])
def test_a_token_behind_each_text_is_added(converted: Build, begins: bool):
    flags = {"add_eos_token": True, "add_bos_token": begins, "bos_token_id": 1}
    folder = converted(**{f"tokenizer.ggml.{key}": each for key, each in flags.items()})
    made = Tokenizer.from_file(str(folder / "tokenizer.json"))
    first = [1] if begins else []
    assert made.encode("ab").ids == [*first, 8, 0]
    assert made.encode("a", "b").ids == [*first, 2, 0, *first, 3, 0]
    assert made.encode("ab", add_special_tokens=False).ids == [8]
    assert json.loads((folder / "tokenizer_config.json").read_text())["add_eos_token"] is True


@pytest.mark.parametrize(("kind", "mode"), [(1, "mean_tokens"), (2, "cls_token"), (3, "lasttoken")])
def test_pooling_is_written_as_sentence_transformers_has_it(converted: Build, kind: int, mode: str):
    folder = converted(**{"llama.pooling_type": kind})
    modules = json.loads((folder / "modules.json").read_text())
    assert [each["type"].rpartition(".")[2] for each in modules] == [
        *("Transformer", "Pooling", "Normalize"),
    ]
    settings = json.loads((folder / "1_Pooling" / "config.json").read_text())
    assert [key for key, on in settings.items() if on is True] == [f"pooling_mode_{mode}"]


@pytest.mark.parametrize("kind", [4, 9, "mean"])
def test_another_pooling_is_refused(converted: Build, kind: Any):
    """A ranking head is not computed."""
    with pytest.raises(UnsupportedModel, match="pooling_type"):
        converted(**{"llama.pooling_type": kind})


def test_no_pooling_writes_no_modules(converted: Build):
    assert not (converted(**{"llama.pooling_type": 0}) / "modules.json").exists()
