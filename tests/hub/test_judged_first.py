"""A model that cannot be served is refused by what describes it, before any of its weights.

By the process that the user started, without torch; each entry asks the same question.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.hub.conftest import SERVABLE
from tests.hub.test_fetch import SmallHub, hub  # noqa: F401  the fixture

from tandem.cli.__main__ import main
from tandem.cli.serve.listening import free_ports
from tandem.engine.config.families import FAMILIES, check_architecture, explained
from tandem.hub import HubError, UnsupportedModel, prepare
from tandem.hub.gguf.head import START_BYTES, read_keys
from tandem.llm import LLM
from tandem.protocol.errors import InvalidParameter

Build = Callable[..., Path]
ENTRIES = ["serve", "up", "prefill", "decode", "bench throughput"]
YARN = {"rope_type": "longrope", "factor": 2.0}
UNSERVABLE: list[tuple[dict[str, Any], str, str]] = [
    ({"architectures": ["DbrxForCausalLM"]}, "", "experts.*nearest is LlamaForCausalLM"),
    ({"architectures": ["GPT2LMHeadModel"], "num_attention_heads": None}, "", "GPT2LMHeadModel"),
    ({"architectures": ["Gemma2ForCausalLM"]}, "", "nearest is Gemma3ForCausalLM"),
    ({"quantization_config": {"quant_method": "quip"}}, "", "quant_method: 'quip'.*nearest"),
    ({"compression_config": {"quant_method": "compressed-tensors"}}, "", "config_groups"),
    ({"rope_parameters": YARN}, "", "rope_type"),
    ({"hidden_act": "relu"}, "", "hidden_act"),
    ({}, "--max-model-len 8k", "max_model_len: 8000 is not allowed; at most 4096"),
    ({}, "--device cuda", "device: 'cuda' is not allowed; cpu, or auto"),
    ({}, "--dtype int8", "'int8' is not allowed"),
    ({}, "--kv-cache-dtype float16", "kv_cache_dtype"),
    ({}, "-tp 3", "tensor_parallel_size: 3"),
]


def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize(("config", "flags", "said"), UNSERVABLE)
def test_the_first_process_refuses_by_config_json(
    entry: str,
    config: dict[str, Any],
    flags: str,
    said: str,
    model_folder: Build,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    """A line at exit status 2, though the weights are not there: nothing has looked for them."""
    no_gpu(monkeypatch)
    folder = model_folder(**SERVABLE | config)
    (folder / "model.safetensors").unlink()
    assert main([*entry.split(), "--model", str(folder), *flags.split()]) == 2
    line = capsys.readouterr().err
    assert len(line.splitlines()) == 1
    assert re.search(said, line), line


@pytest.mark.parametrize(("config", "flags", "said"), UNSERVABLE[:7])
def test_a_program_refuses_by_config_json(
    config: dict[str, Any], flags: str, said: str, model_folder: Build
):
    """``LLM`` says the same, and so does ``tandem prepare``."""
    folder = model_folder(**SERVABLE | config)
    (folder / "model.safetensors").unlink()
    with pytest.raises(InvalidParameter, match=said):
        LLM(str(folder))


def test_torch_is_not_imported_to_refuse(model_folder: Build):
    folder = model_folder(**SERVABLE | {"architectures": ["DbrxForCausalLM"]})
    script = (
        "import sys\n"
        "from tandem.cli.__main__ import main\n"
        "for command in ('serve', 'up', 'prefill', 'decode', 'prepare'):\n"
        "    assert main([command, '--model', sys.argv[1]]) != 0\n"
        "assert not {'torch', 'triton', 'transformers'} & sys.modules.keys()\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(folder)], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


def fetched(
    source: str, hub_url: str, scratch: Path, *flags: str
) -> subprocess.CompletedProcess[str]:
    """What ``tandem serve`` says of a model of the hub."""
    environment = os.environ | {
        "HF_ENDPOINT": hub_url,
        "HF_HOME": str(scratch / "hf"),
        "HF_HUB_DISABLE_XET": "1",
        "TANDEM_CACHE": str(scratch / "cache"),
    }
    port = str(free_ports(1)[0])
    command = [sys.executable, "-m", "tandem.cli", "serve", source, "--port", port, *flags]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.full
@pytest.mark.parametrize(
    ("config", "flags", "said"), [each for each in UNSERVABLE if "cuda" not in each[1]][::3]
)
def test_no_weights_are_fetched_of_what_cannot_be_served(
    hub: SmallHub,  # noqa: F811
    tmp_path: Path,
    config: dict[str, Any],
    flags: str,
    said: str,
):
    """The hub is asked for JSON alone."""
    own = {"architectures": ["LlamaForCausalLM"], **SERVABLE, **config}
    (hub.folder / "config.json").write_text(json.dumps(own))
    done = fetched("owner/name", hub.url, tmp_path, *flags.split())
    assert done.returncode == 2, done.stderr
    assert "model.safetensors" not in hub.sent
    assert not any("model.safetensors" in path for path in hub.asked)


def test_a_missing_tokenizer_is_seen_before_weights(hub: SmallHub, tmp_path: Path):  # noqa: F811
    own = {"architectures": ["LlamaForCausalLM"], **SERVABLE}
    (hub.folder / "config.json").write_text(json.dumps(own))
    (hub.folder / "tokenizer.json").rename(hub.folder / "tekken.json")
    done = fetched("owner/name", hub.url, tmp_path)
    assert "tekken.json and no tokenizer.json" in done.stderr
    assert "model.safetensors" not in hub.sent


def test_a_gguf_file_of_a_hub_is_judged_by_its_first_bytes(
    hub: SmallHub,  # noqa: F811
    gguf_file: Build,
    tmp_path: Path,
):
    """Its head is fetched, and not the file."""
    path = gguf_file("gemma2")
    with path.open("ab") as file:
        file.truncate(START_BYTES * 4)
    path.rename(hub.folder / "m.gguf")
    done = fetched("owner/name/m.gguf", hub.url, tmp_path)
    assert "architecture 'gemma2'" in done.stderr
    assert hub.sent["m.gguf"] <= START_BYTES


@pytest.mark.parametrize(
    ("family", "extra", "flags", "said"),
    [
        ("gemma2", {}, "", "architecture 'gemma2'"),
        ("llama", {"llama.expert_count": 8}, "", "mixture of experts"),
        ("qwen3", {}, "--max-model-len 129", "max_model_len: 129 is not allowed; at most 128"),
        ("llama", {"split.count": 3}, "", "one of 3 parts"),
    ],
)
def test_a_gguf_file_is_judged_before_it_is_converted(
    family: str,
    extra: dict[str, Any],
    flags: str,
    said: str,
    gguf_file: Build,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    """Nothing of it is in the cache."""
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    path = gguf_file(family, extra=extra)
    assert main(["serve", str(path), *flags.split()]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "cache" / "models").exists()


def test_first_bytes_of_anything_are_read_without_harm(gguf_file: Build):
    """A file that is cut anywhere gives the keys before the cut."""
    start = gguf_file().read_bytes()
    whole = read_keys(start)
    assert whole["llama.context_length"] == 128
    assert whole["tokenizer.ggml.tokens"] == 10
    for cut in range(0, 2_000, 7):
        assert read_keys(start[:cut]).items() <= whole.items()
    assert read_keys(b"GGUF" + b"\xff" * 60) == {}


@pytest.mark.full
@pytest.mark.parametrize(
    ("files", "said"),
    [
        (["m-Q4.gguf", "m-Q8.gguf"], r"name one of them: owner/name/m-Q4.gguf, owner/name/m-Q8"),
        (["adapter_config.json"], "a LoRA adapter"),
        (["model_index.json"], "diffusers"),
        (["params.json"], "Mistral's own format"),
    ],
)
def test_what_is_no_model_in_this_layout_is_named(
    files: list[str],
    said: str,
    hub: SmallHub,  # noqa: F811
    tmp_path: Path,
):
    """A repository that holds something else says what, and what to name in its place."""
    for file in hub.folder.iterdir():
        file.unlink()
    for name in files:
        (hub.folder / name).write_text("{}")
    assert said in fetched("owner/name", hub.url, tmp_path).stderr
    with pytest.raises(HubError, match=said.replace("owner/name", ".*")):
        prepare(str(hub.folder))


def test_weights_in_another_format_are_named(hub: SmallHub, tmp_path: Path):  # noqa: F811
    own = {"architectures": ["LlamaForCausalLM"], **SERVABLE}
    (hub.folder / "config.json").write_text(json.dumps(own))
    (hub.folder / "model.safetensors").rename(hub.folder / "pytorch_model.bin")
    assert "weights in pytorch_model.bin" in fetched("owner/name", hub.url, tmp_path).stderr
    assert "pytorch_model.bin" not in hub.sent


def test_a_tool_s_own_file_is_refused_by_its_key(model_folder: Build):
    """The file counts if config.json does not state the form."""
    folder = model_folder(**SERVABLE)
    (folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "W4A8_AWQ"}}')
    with pytest.raises(InvalidParameter, match=r"hf_quant_config\.json\.quant_algo: 'W4A8_AWQ'"):
        LLM(str(folder))


@pytest.mark.parametrize(
    ("architecture", "nearest"),
    [
        ("Qwen3VLMoeForConditionalGeneration", "Qwen3ForCausalLM"),
        ("Qwen2_5_VLForConditionalGeneration", "Qwen2ForCausalLM"),
        ("DistilBertForSequenceClassification", "BertForSequenceClassification"),
        ("LlamaForTokenClassification", "LlamaForCausalLM"),
        ("ModernBertModel", "BertModel"),
        ("DeepseekV32ForCausalLM", "DeepseekV3ForCausalLM"),
        ("ChatGLMModel", "GlmModel"),
        ("GPTNeoXForCausalLM", "LlamaForCausalLM"),
    ],
)
def test_the_nearest_architecture_is_of_the_same_kind(architecture: str, nearest: str):
    """By family first, then by what is done with its layers."""
    assert f"the nearest is {nearest};" in explained(architecture, FAMILIES)
    assert nearest in FAMILIES


def test_the_model_type_finds_the_nearest_of_a_class_with_another_name():
    config = {"architectures": ["OursForCausalLM"], "model_type": "phi3"}
    with pytest.raises(InvalidParameter, match=r"OursForCausalLM.*nearest is Phi3ForCausalLM;"):
        check_architecture(config)


@pytest.mark.parametrize(
    ("architecture", "words"),
    [
        ("Llama4ForConditionalGeneration", "attention in chunks cannot be computed yet"),
        ("Gemma4ForCausalLM", "heads of several widths.*nearest is Gemma3ForCausalLM"),
    ],
)
def test_layers_that_no_family_computes_are_named(architecture: str, words: str):
    with pytest.raises(InvalidParameter, match=words):
        check_architecture({"architectures": [architecture]})


def test_a_gguf_file_that_is_fine_passes(gguf_file: Build, tmp_path: Path):
    seen: list[dict[str, Any]] = []

    def check(folder: Path) -> None:
        seen.append(json.loads((folder / "config.json").read_text()))

    found = prepare(str(gguf_file()), cache_dir=tmp_path, progress=False, check=check)
    own = json.loads((found.path / "config.json").read_text())
    assert {key: own[key] for key in seen[0]} == seen[0]
    with pytest.raises(UnsupportedModel):
        prepare(str(gguf_file("gemma2")), cache_dir=tmp_path, progress=False)
