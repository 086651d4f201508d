"""Gemma 3 270M from GGUF: the converted folder equals what transformers reads from the file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gemma3 import IS_INSTALLED, WHY_SKIPPED, gemma_file
from safetensors.torch import load_file
from tests.dense_model import write_dense_model

from tandem.hub import prepare

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.slow,
    pytest.mark.skipif(not IS_INSTALLED, reason=WHY_SKIPPED),
]


def test_weights_and_settings_equal_those_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    file = gemma_file(tmp_path)
    folder = prepare(str(file), progress=False).path
    dense = write_dense_model(folder, tmp_path / "dense")
    model = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
    theirs = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)
    weights = load_file(dense / "model.safetensors")
    assert weights.keys() == theirs["tensors"].keys()
    for name, values in theirs["tensors"].items():
        assert torch.equal(weights[name], torch.as_tensor(values)), name
    for key, value in theirs["config"].items():
        if hasattr(model.config, key) and not key.endswith("rope_theta"):
            assert getattr(model.config, key) == value, key
    assert model.config.layer_types.index("full_attention") == 5
