"""The tiny wide models in every form of weights, as each tool stores it on disk.

A form packs one weight into the tool's tensors, and returns the weight that they stand for.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tests.engine_run.form_configs import (
    AWQ,
    FLOAT4,
    FLOAT8,
    FP8_STATIC,
    FP8_TOKEN,
    INT8,
    acts,
    compressed_config,
    gptq_config,
    packed_config,
)
from tests.engine_run.fp8_models import quantised, scaled
from tests.engine_run.tiny_models import class_of, folder_of, temporary_folder
from torch import Tensor

Packed = tuple[dict[str, Tensor], Tensor]
"""Tensors by the ends of their names, and the weight that they stand for, float32 [out, in]."""
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def words(codes: Tensor, bits: int) -> Tensor:
    """int32 [rows, columns * bits / 32] of whole numbers, the first one in the lowest bits."""
    each = 32 // bits
    found = torch.nn.functional.pad(codes.long(), (0, -codes.shape[1] % each))
    found = found.view(len(codes), -1, each) << (torch.arange(each) * bits)
    return found.sum(-1).to(torch.uint32).view(torch.int32)


def in_groups(weight: Tensor, bits: int, group: int, symmetric: bool) -> tuple[Tensor, ...]:
    """Codes [out, in], float16 scales and zero points [out, groups] of consecutive inputs."""
    parts = weight.view(len(weight), -1, weight.shape[1] if group == -1 else group)
    top = (1 << bits) - 1
    if symmetric:
        scale = parts.abs().amax(-1) * 2 / top
        zeros = torch.full_like(scale, 1 << (bits - 1))
    else:
        low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
        scale = (high - low) / top
        zeros = (-low / scale).round().clamp(0, top)
    scale = scale.half()
    codes = (parts / scale.float()[..., None]).round() + zeros[..., None]
    return codes.clamp(0, top).flatten(1), scale, zeros


def meant(codes: Tensor, scale: Tensor, zeros: Tensor) -> Tensor:
    parts = codes.view(*scale.shape, -1)
    return ((parts - zeros[..., None]) * scale.float()[..., None]).flatten(1)


def awq(weight: Tensor, *, group: int) -> Packed:
    codes, scale, zeros = in_groups(weight, 4, group, False)

    def columns(found: Tensor) -> Tensor:
        eights = found.t().reshape(found.shape[1], -1, 8)[:, :, list(_AWQ_ORDER)]
        return words(eights.flatten(1), 4)

    tensors = {"qweight": columns(codes), "qzeros": columns(zeros), "scales": scale.t()}
    return tensors, meant(codes, scale, zeros)


def gptq(
    weight: Tensor,
    *,
    bits: int,
    group: int,
    symmetric: bool,
    version: int = 1,
    ordered: bool = False,
) -> Packed:
    """``ordered``: the inputs of a group are any, the same ones in each layer of this width."""
    inner, size = weight.shape[1], weight.shape[1] if group == -1 else group
    order = torch.arange(inner)
    if ordered:
        order = torch.randperm(inner, generator=torch.Generator().manual_seed(inner))
    codes, scale, zeros = in_groups(weight[:, order], bits, group, symmetric)
    index, found = torch.empty(inner, dtype=torch.int32), torch.empty_like(weight)
    index[order] = (torch.arange(inner) // size).int()
    stands_for = torch.empty_like(weight)
    stands_for[:, order] = meant(codes, scale, zeros)
    found[:, order] = codes
    stored = (zeros - 1) % (1 << bits) if version == 1 else zeros
    tensors = {
        "qweight": words(found, bits).t(),
        "qzeros": words(stored.t(), bits),
        "scales": scale.t(),
        "g_idx": index,
    }
    return tensors, stands_for


def compressed(
    weight: Tensor, *, bits: int, group: int, symmetric: bool, ordered: bool = False
) -> Packed:
    """The codes of ``gptq`` under the names and in the layout of compressed-tensors."""
    tensors, stands_for = gptq(
        weight, bits=bits, group=group, symmetric=symmetric, version=2, ordered=ordered
    )
    held = {
        "weight_packed": tensors["qweight"].t(),
        "weight_scale": tensors["scales"].t(),
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        each, outputs = 32 // bits, len(weight)
        shifts = torch.arange(each) * bits
        zeros = (tensors["qzeros"].long()[..., None] >> shifts & (1 << bits) - 1).flatten(1)
        held["weight_zero_point"] = words(zeros[:, :outputs], bits).t()
    if ordered:
        held["weight_g_idx"] = tensors["g_idx"]
    return held, stands_for


def block_fp8(weight: Tensor, *, end: str = "weight_scale") -> Packed:
    codes, scale = quantised(weight)
    return {"weight": codes, end: scale}, scaled(codes, scale)


def fp8(weight: Tensor, *, channel: bool, shape: tuple[int, ...], static: str = "") -> Packed:
    most = weight.abs().amax(1) if channel else weight.abs().amax()
    scale = most / 448
    codes = (weight / (scale[:, None] if channel else scale)).to(torch.float8_e4m3fn)
    tensors = {"weight": codes, "weight_scale": scale.reshape(shape)}
    if static:
        tensors[static] = torch.tensor(0.5)
    return tensors, codes.float() * (scale[:, None] if channel else scale)


def int8(weight: Tensor, *, channel: bool) -> Packed:
    most = weight.abs().amax(1, keepdim=True) if channel else weight.abs().amax().reshape(1, 1)
    scale = most / 127
    codes = (weight / scale).round().to(torch.int8)
    stored = scale if channel else scale.reshape(1)
    return {"weight": codes, "weight_scale": stored}, codes.float() * scale


def _nibbles(numbers: Tensor) -> Tensor:
    """e2m1 codes uint8 [.., in] of the nearest numbers."""
    nearest = (numbers.abs()[..., None] - FP4).abs().argmin(-1)
    return (nearest + 8 * (numbers < 0)).to(torch.uint8)


def _pairs(nibbles: Tensor) -> Tensor:
    return nibbles[:, ::2] | nibbles[:, 1::2] << 4


def fp4_numbers(nibbles: Tensor) -> Tensor:
    return torch.cat((FP4, -FP4))[nibbles.int()]


def mxfp4(weight: Tensor) -> Packed:
    groups = weight.view(len(weight), -1, 32)
    exponents = (groups.abs().amax(-1).log2().floor() - 2).clamp(min=-126)
    units = torch.exp2(exponents)[..., None]
    nibbles = _nibbles((groups / units).clamp(-6, 6))
    packed = _pairs(nibbles.flatten(1))
    tensors = {"weight_packed": packed, "weight_scale": (exponents + 127).to(torch.uint8)}
    return tensors, (fp4_numbers(nibbles) * units).flatten(1)


def nvfp4(weight: Tensor, *, modelopt: bool = False) -> Packed:
    """The weights after a re-coding to fp8 blocks by the nearest codes. The tensor's scale is a
    power of two, so that no product before the re-coding is rounded."""
    groups = weight.view(len(weight), -1, 16)
    factor = torch.exp2((groups.abs().amax() / (6 * 448)).log2().ceil())
    scale = (groups.abs().amax(-1) / 6 / factor).to(torch.float8_e4m3fn)
    units = scale.float() * factor
    nibbles = _nibbles((groups / units[..., None].clamp(min=1e-30)).clamp(-6, 6))
    packed = _pairs(nibbles.flatten(1))
    recoded = scaled(*quantised((fp4_numbers(nibbles) * units[..., None]).flatten(1)))
    if modelopt:
        own = {"weight_scale_2": factor, "input_scale": torch.tensor(0.5)}
        return {"weight": packed, "weight_scale": scale, **own}, recoded
    own = {"weight_global_scale": (1 / factor).reshape(1), "input_global_scale": torch.ones(1)}
    return {"weight_packed": packed, "weight_scale": scale, **own}, recoded


Form = tuple[dict[str, Any], Callable[[Tensor], Packed]]
"""quantization_config, and the tensors of one weight."""


def _renamed(packed: Packed, old: str, new: str) -> Packed:
    """Tensors under the names of transformers."""
    tensors, meant = packed
    return {new if end == old else end: each for end, each in tensors.items()}, meant


def _channel(weight: Tensor) -> Packed:
    return fp8(weight, channel=True, shape=(len(weight), 1))


FORMS: dict[str, Form] = {
    "awq": ({**AWQ, "group_size": 64}, lambda w: awq(w, group=64)),
    "awq-whole": ({**AWQ, "group_size": -1}, lambda w: awq(w, group=-1)),
    "gptq": (
        gptq_config(bits=4, group_size=128, sym=True, desc_act=False),
        lambda w: gptq(w, bits=4, group=128, symmetric=True),
    ),
    "gptq-v2-ordered": (
        gptq_config(bits=4, group_size=32, sym=False, desc_act=True)
        | {"checkpoint_format": "gptq_v2"},
        lambda w: gptq(w, bits=4, group=32, symmetric=False, version=2, ordered=True),
    ),
    "gptq-8-ordered": (
        gptq_config(bits=8, group_size=64, sym=False, desc_act=True),
        lambda w: gptq(w, bits=8, group=64, symmetric=False, ordered=True),
    ),
    "gptq-8-whole": (
        gptq_config(bits=8, group_size=-1, sym=True, desc_act=False),
        lambda w: gptq(w, bits=8, group=-1, symmetric=True),
    ),
    "packed": (
        packed_config(4, 32, True),
        lambda w: compressed(w, bits=4, group=32, symmetric=True),
    ),
    "packed-ordered": (
        packed_config(4, 128, False, actorder="group"),
        lambda w: compressed(w, bits=4, group=128, symmetric=False, ordered=True),
    ),
    "packed-8": (
        packed_config(8, -1, True),
        lambda w: compressed(w, bits=8, group=-1, symmetric=True),
    ),
    "fp8-tensor": (
        {"quant_method": "fp8", "activation_scheme": "static"},
        lambda w: fp8(w, channel=False, shape=(), static="input_scale"),
    ),
    "fp8-tensor-inv": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": None},
        lambda w: _renamed(fp8(w, channel=False, shape=()), "weight_scale", "weight_scale_inv"),
    ),
    "fbgemm": ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, _channel),
    "float-channel": (
        compressed_config("float-quantized", {**FLOAT8, "strategy": "channel"}, FP8_TOKEN),
        _channel,
    ),
    "float-tensor": (
        compressed_config("float-quantized", {**FLOAT8, "strategy": "tensor"}, FP8_STATIC),
        lambda w: fp8(w, channel=False, shape=(1,), static="input_scale"),
    ),
    "float-block": (
        compressed_config(
            "float-quantized",
            {**FLOAT8, "strategy": "block", "block_structure": [128, 128]},
            acts(8, "float", strategy="group", group_size=128),
        ),
        block_fp8,
    ),
    "modelopt-fp8": (
        {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head"]},
        lambda w: fp8(w, channel=False, shape=(), static="input_scale"),
    ),
    "int8": (
        compressed_config(
            "int-quantized", {**INT8, "strategy": "channel"}, acts(8, "int", strategy="token")
        ),
        lambda w: int8(w, channel=True),
    ),
    "int8-tensor": (
        compressed_config(
            "int-quantized", {**INT8, "strategy": "tensor"}, acts(8, "int", strategy="token")
        ),
        lambda w: int8(w, channel=False),
    ),
    "mxfp4": (
        compressed_config(
            "mxfp4-pack-quantized", {**FLOAT4, "strategy": "group", "group_size": 32}
        ),
        mxfp4,
    ),
    "nvfp4": (
        compressed_config(
            "nvfp4-pack-quantized",
            {**FLOAT4, "strategy": "tensor_group", "group_size": 16},
            acts(4, "float", strategy="tensor_group", group_size=16) | {"dynamic": "local"},
        ),
        nvfp4,
    ),
    "modelopt-nvfp4": (
        {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "group_size": 16,
            "ignore": ["lm_head"],
        },
        lambda w: nvfp4(w, modelopt=True),
    ),
}


@cache
def form_folders(
    form: str, name: str = "llama-untied-biased", kept: tuple[str, ...] = ()
) -> tuple[Path, Path]:
    """Two folders of one model: in the form, and with the weights that its tensors stand for.
    Layers whose names begin with one of ``kept`` are plain; the caller changes config.json."""
    return write_form(form, folder_of(name, wide=True), kept)


def write_form(form: str, source: Path, kept: tuple[str, ...] = ()) -> tuple[Path, Path]:
    """``form_folders`` of the plain model in a folder, with its other files."""
    quantization, pack = FORMS[form]
    tensors = {
        key: tensor
        for file in source.glob("*.safetensors")
        for key, tensor in load_file(file).items()
    }
    held, plain = dict(tensors), dict(tensors)
    for key, tensor in tensors.items():
        if key.endswith("_proj.weight") and not key.startswith(kept or ("none",)):
            packed, plain[key] = pack(tensor)
            del held[key]
            prefix = key.removesuffix(".weight")
            held |= {f"{prefix}.{end}": each.contiguous() for end, each in packed.items()}
    config = json.loads((source / "config.json").read_text())
    folders = []
    for each, more in ((held, {"quantization_config": quantization}), (plain, {})):
        folder = temporary_folder(f"tandem-{form}-")
        skipped = shutil.ignore_patterns("*.safetensors*")
        shutil.copytree(source, folder, ignore=skipped, dirs_exist_ok=True)
        save_file(each, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({**config, **more}))
        folders.append(folder)
    return folders[0], folders[1]


def to_int8(x: Tensor) -> Tensor:
    """The nearest of 255 multiples of a row's largest number over 127."""
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 127
    return (x / scale).round() * scale


def to_e4m3(x: Tensor) -> Tensor:
    """The nearest e4m3 numbers, the largest of a row being 448."""
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


def model_of(
    folder: Path, name: str, rounds: Callable[[Tensor], Tensor] | None = None
) -> torch.nn.Module:
    """transformers' model in float32, whose linear layers round their inputs first."""
    model: torch.nn.Module = class_of(name).from_pretrained(folder, dtype=torch.float32).eval()
    for key, module in model.named_modules():
        if rounds is not None and key.endswith("_proj"):
            module.register_forward_pre_hook(lambda _, inputs: (rounds(inputs[0]),))
    return model


def judged_form(
    form: str, name: str, prompts: list[list[int]], count: int, *, folder: Path | None = None
) -> list[list[int]]:
    """transformers' greedy tokens over the weights that the form's tensors stand for, in float32;
    for int8 with rounded activations."""
    rounds = to_int8 if form.startswith("int8") else None
    model = model_of(folder or form_folders(form, name)[1], name, rounds)
    made = []
    with torch.inference_mode():
        for prompt in prompts:
            tokens = list(prompt)
            for _ in range(count):
                tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
            made.append(tokens[len(prompt) :])
    return made
