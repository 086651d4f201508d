"""`tandem bench throughput`: requests fit the engine, or a line says not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tandem.cli.__main__ import main
from tandem.cli.bench import inprocess
from tandem.cli.bench.load import LoadConfig
from tandem.cli.bench.throughput import fitted
from tandem.engine.config import EngineConfig
from tandem.protocol.errors import InvalidParameter

CPU = ["--device", "cpu", "--dtype", "float32", "--num-gpu-blocks-override", "24"]


@pytest.fixture
def short(smollm2: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "short"
    folder.mkdir()
    for path in smollm2.iterdir():
        (folder / path.name).symlink_to(path)
    config = json.loads((smollm2 / "config.json").read_text())
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 2048}))
    return folder


def load(prompt: int, output: int, longest: int = 8192) -> LoadConfig:
    return LoadConfig(
        num_prompts=2,
        random_input_len=prompt,
        random_output_len=output,
        max_model_len=longest,
    )


def test_an_engine_is_no_longer_than_its_model(short: Path) -> None:
    """8,192 tokens are a default, not asked for."""
    config = EngineConfig.of(short, device="cpu")
    assert fitted(load(8, 4), config)[1].max_model_len == 2048
    with pytest.raises(InvalidParameter, match="prompt and answer: 2049 is not allowed; at most"):
        fitted(load(2040, 9), config)


def test_an_engine_is_as_long_as_its_requests(smollm2: Path) -> None:
    """Of a model that could take more: 8,192 tokens, or what the longest request has."""
    config = EngineConfig.of(smollm2, device="cpu")
    assert fitted(load(8, 4, 256), config)[1].max_model_len == 256
    todo, longer = fitted(load(500, 12, 256), config)
    assert (len(todo), longer.max_model_len) == (2, 512)


def test_a_trace_is_cut_to_its_model(short: Path, tmp_path: Path) -> None:
    """A file without requests is named."""
    path = tmp_path / "trace.csv"
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens", "2024-01-01 00:00:00.0,7000,100"]
    path.write_text("\n".join(lines))
    asked = LoadConfig(dataset_path=str(path))
    (ask,), config = fitted(asked, EngineConfig.of(short, device="cpu"))
    assert (len(ask.prompt), ask.max_tokens, config.max_model_len) == (1948, 100, 2048)
    path.write_text(lines[0])
    with pytest.raises(InvalidParameter, match="at least one request"):
        fitted(asked, config)


@pytest.mark.parametrize(
    "words",
    [
        "throughput --random-input-len 100 --max-model-len 128 --random-output-len 29",
        "throughput --random-input-len 9000",
        "throughput --max-model-len 9000",
        "throughput --max-model-len 512 --random-input-len 500",
    ],
)
def test_a_request_that_does_not_fit_is_one_line(
    words: str, smollm2: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inprocess, "make_executor", None)
    assert main(["bench", *words.split(), "--model", str(smollm2), *CPU]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert "is not allowed; at most" in said


def test_what_an_engine_refuses_is_one_line(
    smollm2: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such as what its blocks never hold, of which it knows once it runs."""
    words = ["throughput", "--model", str(smollm2), *CPU, "--random-input-len", "500"]
    assert main(["bench", *words]) == 1
    said = capsys.readouterr().err.splitlines()
    assert "the engine refused a request" in said[-1]
    assert "Traceback" not in "".join(said)
