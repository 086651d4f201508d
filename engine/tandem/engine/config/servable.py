"""Checks that this machine can serve a model, without weights and torch, before they are
fetched."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tandem.engine.config.engine import EngineConfig
from tandem.engine.config.facts import ModelFacts
from tandem.engine.config.families import check_architecture, check_servable
from tandem.engine.config.read import CONFIG, read_facts
from tandem.engine.config.weight_files import read_json
from tandem.protocol.errors import InvalidParameter

_DEVICES = ("nvidia[0-9]*", "dxg", "nvhost-gpu", "nvgpu")
"""Files in /dev of a CUDA device: discrete, WSL, Tegra."""
_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")


def check_model(folder: str | Path, settings: Mapping[str, Any] | None = None) -> ModelFacts:
    """Return the model's facts. Raises InvalidParameter that names the unsupported part.

    ``settings`` are the engine's by their flat names.
    """
    settings = {name: value for name, value in (settings or {}).items() if name != "model"}
    check_device(settings.get("device") or "auto")
    path = Path(folder)
    check_architecture(read_json(path / CONFIG, needed=True))
    facts = read_facts(path)
    check_servable(facts)
    _check_rope(facts)
    if facts.dtype is None:  # a GGUF file's type is known when its tensors are read
        settings.pop("kv_cache_dtype", None)
    EngineConfig.of(path, facts=facts, **settings)
    return facts


def check_device(device: str) -> None:
    """Raise InvalidParameter for a device that this machine does not have."""
    if device != "cuda":
        return
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible in ("", "-1"):
        allowed = f"cpu, or auto: CUDA_VISIBLE_DEVICES={visible!r} hides every GPU"
        raise InvalidParameter("device", device, allowed)
    if not any(True for each in _DEVICES for _ in Path("/dev").glob(each)):
        raise InvalidParameter("device", device, "cpu, or auto: no NVIDIA GPU is visible here")


def _check_rope(facts: ModelFacts) -> None:
    rope = facts.rope
    if facts.encoder is None and rope.kind not in _KINDS:
        allowed = f"one of {', '.join(_KINDS)}"
        raise InvalidParameter(f"{CONFIG}: rope_parameters.rope_type", rope.kind, allowed)
