"""One decode step of Qwen3-8B by its kernels alone: python bench/kernels/step.py.

All layers, the head and the greedy choice in one CUDA graph, over cold weights and cold pages of
random numbers: what an engine's step can come down to. `apart` takes norm, addition and activation
as ops of their own and products from cuBLAS; `folded` takes the products of kernels.gemm.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from tandem.kernels.activation import silu_and_mul
from tandem.kernels.attention.decode import triton as attention
from tandem.kernels.gemm import linear as product
from tandem.kernels.gemm import linear_add, norm_gated, norm_linear
from tandem.kernels.measure.timing import Case, Shape, make_case, replay_us
from tandem.kernels.norm import rms_norm
from tandem.kernels.rotary_kv import QKNorm, Rotation, SlotMapping, rotary_kv
from tandem.kernels.sampling import best

SHAPE = Shape()
LAYERS, HIDDEN, INTER, VOCAB, EPS = 36, 4096, 12288, 151_936, 1e-6
WEIGHT_BYTES = 2 * (LAYERS * HIDDEN * (6144 + 4096 + 3 * INTER) + VOCAB * HIDDEN)


class Weights(NamedTuple):
    """One layer's."""

    qkv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor
    gain: Tensor


class Model(NamedTuple):
    """Random weights of the sizes of Qwen3-8B."""

    layers: list[Weights]
    head: Tensor
    norm: QKNorm


def random(*shape: int) -> Tensor:
    """Numbers that keep activations near 1."""
    return torch.randn(*shape, dtype=torch.bfloat16, device="cuda") * shape[-1] ** -0.5


def make_model() -> Model:
    """16 GB of weights."""
    gain = torch.ones(HIDDEN, dtype=torch.bfloat16, device="cuda")
    layers = [
        Weights(
            random(6144, HIDDEN),
            random(HIDDEN, HIDDEN),
            random(2 * INTER, HIDDEN),
            random(HIDDEN, INTER),
            gain,
        )
        for _ in range(LAYERS)
    ]
    ones = torch.ones(SHAPE.head_dim, dtype=torch.bfloat16, device="cuda")
    return Model(layers, random(VOCAB, HIDDEN), QKNorm(ones, ones, EPS))


class Step(NamedTuple):
    """One batch and how its attention is launched."""

    case: Case
    residual: Tensor
    rotation: Rotation
    slot_mapping: SlotMapping
    tuning: attention.Tuning

    def attend(self, model: Model, qkv: Tensor, layer: int, memo: Case) -> Tensor:
        """Run attention from the projection up to the projection back."""
        kv = memo.layer(layer)
        q = rotary_kv(
            qkv.view(qkv.shape[0], -1, SHAPE.head_dim),
            kv,
            self.rotation,
            self.slot_mapping,
            model.norm,
        )
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        attention.launch(q, kv, memo.batch, SHAPE.head_dim**-0.5, out, None, self.tuning)
        return out.flatten(1)


def folded(model: Model, step: Step) -> Tensor:
    """Norm, addition and activation within the products where the table has them so."""
    case = replace(step.case, batch=replace(step.case.batch, memo={}))
    stream = step.residual.clone()
    for i, w in enumerate(model.layers):
        attended = step.attend(model, norm_linear(stream, w.gain, EPS, w.qkv), i, case)
        linear_add(attended, w.out, stream)
        linear_add(norm_gated(stream, w.gain, EPS, w.gate_up), w.down, stream)
    return best(norm_linear(stream, model.layers[0].gain, EPS, model.head))


def apart(model: Model, step: Step, multiply: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Every op by itself."""
    case = replace(step.case, batch=replace(step.case.batch, memo={}))
    stream = step.residual.clone()
    for i, w in enumerate(model.layers):
        qkv = multiply(rms_norm(stream, w.gain, EPS), w.qkv)
        stream += multiply(step.attend(model, qkv, i, case), w.out)
        gate_up = multiply(rms_norm(stream, w.gain, EPS), w.gate_up)
        stream += multiply(silu_and_mul(gate_up), w.down)
    return best(multiply(rms_norm(stream, model.layers[0].gain, EPS), model.head))


def make_step(batch: int, context: int) -> Step:
    """`batch` sequences of `context` tokens, the last of which this step writes."""
    case = make_case(SHAPE, [context] * batch, [1] * batch, LAYERS)
    last = case.batch.block_tables[:, (context - 1) // SHAPE.page].long()
    angles = torch.rand(2, batch, SHAPE.head_dim, device="cuda").to(torch.bfloat16)
    offsets = torch.full_like(last, (context - 1) % SHAPE.page)
    return Step(
        case,
        random(batch, HIDDEN),
        Rotation(*angles),
        SlotMapping(last, offsets),
        attention.DEFAULT,
    )


def main() -> None:
    """Time the variants of each batch, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", nargs="+", default=["1x512", "8x1024", "32x1024", "64x1024"])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    model, found = make_model(), []
    for name in args.batches:
        batch, context = (int(part) for part in name.split("x"))
        step = make_step(batch, context)
        floor = (WEIGHT_BYTES + LAYERS * batch * context * SHAPE.key_bytes) / 4.4e6
        variants: dict[str, Callable[[], Tensor]] = {
            "apart, cuBLAS": lambda step=step: apart(model, step, linear)
        }
        for early in (True, False):
            tuned = step._replace(tuning=replace(attention.DEFAULT, early=early))
            when = f"attention {'early' if early else 'after'}"
            variants[f"apart, table, {when}"] = lambda step=tuned: apart(model, step, product)
            variants[f"folded, {when}"] = lambda step=tuned: folded(model, step)
        for label, run in variants.items():
            us = replay_us(run, 1)
            found.append({"batch": name, "variant": label, "us": us, "roofline_us": floor})
            print(f"{name:10} {label:40} {us / 1e3:7.3f} ms, {100 * floor / us:3.0f} %", flush=True)
        del step, variants
        torch.cuda.empty_cache()
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
