"""Prepared GGUF models for transformers: the same weights, decoded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from tandem.kernels.packed_gemm.reference import decoded


def dense_tensors(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a prepared folder; blocks are decoded to float32."""
    form = json.loads((folder / "config.json").read_text()).get("quantization_config", {})
    kinds = {f"{layer}.weight": kind for kind, of in form.get("kinds", {}).items() for layer in of}
    return {
        name: decoded(values, kinds[name]) if name in kinds else values
        for file in sorted(folder.glob("*.safetensors"))
        for name, values in load_file(file).items()
    }


def write_dense_model(folder: Path, target: Path) -> Path:
    """Write the decoded model into ``target``, which must not exist, and return it."""
    skipped = shutil.ignore_patterns("*.safetensors*")
    shutil.copytree(folder, target, ignore=skipped)
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config", None)
    (target / "config.json").write_text(json.dumps(config))
    save_file(dense_tensors(folder), target / "model.safetensors", {"format": "pt"})
    return target
