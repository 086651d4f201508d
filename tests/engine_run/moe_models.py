"""gpt-oss with its experts in MXFP4, as its checkpoints have them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tests.engine_run.form_models import mxfp4
from tests.engine_run.fp8_models import quantised, scaled
from tests.engine_run.tiny_models import folder_of, temporary_folder
from torch import Tensor

MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
}
GROUP = 32


def packed(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Blocks and scales of [experts, in, out], and the weight that they stand for."""
    count, inner, outputs = weight.shape
    tensors, meant = mxfp4(weight.transpose(1, 2).reshape(-1, inner).contiguous())
    blocks = tensors["weight_packed"].view(count, outputs, inner // GROUP, GROUP // 2)
    scales = tensors["weight_scale"].view(count, outputs, inner // GROUP)
    held = {"blocks": blocks, "scales": scales}
    return held, meant.view(count, outputs, inner).transpose(1, 2).contiguous()


@cache
def mxfp4_folders(kept: tuple[int, ...] = ()) -> tuple[Path, Path]:
    """Two folders of one model: with experts in MXFP4, and with the weights that they stand for.
    Experts of the layers ``kept`` are plain."""
    source = folder_of("gpt-oss", wide=True)
    tensors = load_file(source / "model.safetensors")
    held, meant = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith("_proj") and int(name.split(".")[2]) not in kept:
            codes, meant[name] = packed(tensor)
            del held[name]
            held |= {f"{name}_{end}": each for end, each in codes.items()}
    config = json.loads((source / "config.json").read_text())
    names = [*MXFP4["modules_to_not_convert"], *(f"model.layers.{i}.mlp.experts" for i in kept)]
    more = {"quantization_config": {**MXFP4, "modules_to_not_convert": names}}
    folders = []
    for each, added in ((held, more), (meant, {})):
        folder = temporary_folder("tandem-mxfp4-")
        save_file(each, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({**config, **added}))
        folders.append(folder)
    return folders[0], folders[1]


@cache
def rounded_folder() -> Path:
    """gpt-oss with the weights that remain of its own after they are rounded to fp8 in blocks."""
    folder, source = temporary_folder("tandem-rounded-"), folder_of("gpt-oss")
    tensors = load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight"):
            tensors[name] = scaled(*quantised(tensor))
        elif name.endswith(".gate_up_proj"):
            for half in (tensor[:, :, ::2], tensor[:, :, 1::2]):
                half.copy_(torch.stack([scaled(*quantised(each.t())).t() for each in half]))
        elif name.endswith(".down_proj"):
            tensor.copy_(torch.stack([scaled(*quantised(each.t())).t() for each in tensor]))
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    return folder
