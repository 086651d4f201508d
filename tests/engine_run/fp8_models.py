"""The tiny models with their linear layers in fp8, as block-scaled checkpoints have them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tests.engine_run.tiny_models import class_of, folder_of, temporary_folder
from torch.nn.functional import pad

BLOCK = 128
MOST = 448.0
"""The largest number of e4m3."""
QUANTIZATION: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
}


def quantised(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 codes and the scale of each block, whose largest weight is the largest code."""
    outputs, inner = weight.shape
    blocks = pad(weight, (0, -inner % BLOCK, 0, -outputs % BLOCK))
    shape = (blocks.shape[0] // BLOCK, BLOCK, blocks.shape[1] // BLOCK, BLOCK)
    scale = blocks.view(shape).abs().amax((1, 3)) / MOST
    codes = (blocks.view(shape) / scale[:, None, :, None]).view(blocks.shape)
    return codes[:outputs, :inner].contiguous().to(torch.float8_e4m3fn), scale


def scaled(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The weights that they stand for, by element."""
    outputs, inner = (torch.arange(extent) // BLOCK for extent in codes.shape)
    return codes.float() * scale[outputs][:, inner]


@cache
def fp8_folders(name: str, *, wide: bool = False, kept: tuple[str, ...] = ()) -> tuple[Path, Path]:
    """Two folders of one model: in fp8, and with the weights that its codes stand for."""
    source = folder_of(name, wide=wide)
    tensors = {
        key: tensor
        for file in source.glob("*.safetensors")
        for key, tensor in load_file(file).items()
    }
    held, meant = dict(tensors), dict(tensors)
    for key, tensor in tensors.items():
        ends = ("_proj.weight", "_mqa.weight", ".w1.weight", ".w2.weight", ".w3.weight")
        linear = key.endswith(ends)
        if linear and not key.startswith(kept or ("none",)):
            codes, scale = quantised(tensor)
            held[key], held[f"{key}_scale_inv"] = codes, scale
            meant[key] = scaled(codes, scale)
    config = json.loads((source / "config.json").read_text())
    of_form = {**QUANTIZATION, "modules_to_not_convert": list(kept)}
    folders = []
    for each, more in ((held, {"quantization_config": of_form}), (meant, {})):
        folder = temporary_folder(f"tandem-fp8-{name}-")
        save_file(each, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({**config, **more}))
        folders.append(folder)
    return folders[0], folders[1]


def judged_fp8(folder: Path, name: str, prompt: list[int], count: int) -> list[int]:
    """transformers' greedy tokens over the weights of ``folder``, in float32."""
    model = class_of(name).from_pretrained(folder, dtype=torch.float32).eval()
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]
