"""The small ops of a step against their rooflines: python bench/kernels/ops.py [--only NAME].

A roofline is the bytes that must move over 4.4 TB/s, or the latency of one launch in a graph where
that is longer. Calls walk over several sets of operands, so that what a step would find cold is
cold; logits are warm or cold as L2 has it, since the head has just written them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tandem.kernels import Backend
from tandem.kernels.activation import silu_and_mul
from tandem.kernels.blocks import pack, unpack
from tandem.kernels.blocks.triton import add_digest
from tandem.kernels.measure.timing import replay_us
from tandem.kernels.norm import rms_norm
from tandem.kernels.rotary_kv import QKNorm, Rotation, SlotMapping, rotary_kv
from tandem.kernels.sampling import (
    Filters,
    Purpose,
    best,
    draw,
    row_keys,
    score_tokens,
    thresholds,
)

READ_RATE = 4.4e6
"""Bytes a µs that these machines' memory gives to reads."""
SETS = 24
HIDDEN, HEADS, KV_HEADS, DIM, INTER, VOCAB = 4096, 32, 8, 128, 12288, 151_936


class Bench(NamedTuple):
    """One thing to time: `run` makes `calls` calls, each of which must move `bytes`."""

    name: str
    run: Callable[[], object]
    calls: int
    bytes: int


def rand(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Standard normal numbers on the GPU."""
    return torch.randn(*shape, dtype=dtype, device="cuda")


def each(call: Callable[..., object], sets: list[Any]) -> Callable[[], object]:
    """`call` on every set of operands."""
    return lambda: [call(*operands) for operands in sets]


def layer_ops(tokens: int) -> Iterator[Bench]:
    """Return the operations of a decoder layer without products and attention."""
    sets = min(SETS, max(4, (1 << 30) // (tokens * INTER * 4)))
    weight, row = rand(HIDDEN), tokens * HIDDEN * 2
    alone = [(rand(tokens, HIDDEN), weight, 1e-6) for _ in range(sets)]
    yield Bench(f"rms_norm, {tokens}", each(rms_norm, alone), sets, 2 * row)
    gates = [(rand(tokens, 2 * INTER),) for _ in range(sets)]
    yield Bench(f"silu_and_mul, {tokens}", each(silu_and_mul, gates), sets, tokens * INTER * 6)
    page, blocks = 64, -(-tokens // 64) + 8
    kv_cache = torch.empty(
        blocks, sets, 2, KV_HEADS, page, DIM, dtype=torch.bfloat16, device="cuda"
    )
    place = torch.randperm(blocks * page, device="cuda")[:tokens]
    angles = (
        Rotation(rand(tokens, DIM), rand(tokens, DIM)),
        SlotMapping(place // page, place % page),
    )
    norm = QKNorm(rand(DIM), rand(DIM), 1e-6)
    heads = HEADS + 2 * KV_HEADS
    layers = [(rand(tokens, heads, DIM), kv_cache[:, i], *angles, norm) for i in range(sets)]
    moved = tokens * DIM * 2 * (heads + HEADS + KV_HEADS + 2 * KV_HEADS)
    yield Bench(f"rotary_kv with qk-norm, {tokens}", each(rotary_kv, layers), sets, moved)


def sampling_ops(rows: int, dtype: torch.dtype) -> Iterator[Bench]:
    """The sampler's ops on a step's logits; flat and peaked ones for the filters."""
    kind = str(dtype).removeprefix("torch.")
    logits = rand(rows, VOCAB, dtype=dtype) * 2
    many = torch.arange(rows, device="cuda")
    keys = row_keys(many, many * 0, many, Purpose.TOKEN)
    heat = torch.full((rows,), 0.8, device="cuda")
    size = rows * VOCAB * dtype.itemsize
    at = f"{rows} rows of {kind}"
    yield Bench(f"best, {at}", lambda: best(logits), 1, size)
    yield Bench(f"torch argmax, {at}", lambda: best(logits, backend=Backend.TORCH), 1, size)
    yield Bench(f"draw, {at}", lambda: draw(logits, keys, many, temperature=heat), 1, size)
    for spread, shape in ((2.0, "flat"), (6.0, "peaked")):
        spiky = (logits.float() / 2 * spread).to(dtype)
        for name, min_p, top_k, top_p in (
            ("top-k 50 top-p 0.9", 0.0, 50, 0.9),
            ("top-p 0.95", 0.0, 0, 0.95),
            ("min-p 0.05", 0.05, 0, 1.0),
        ):
            filters = Filters(
                torch.full((rows,), min_p, device="cuda"),
                torch.full((rows,), top_k, device="cuda"),
                torch.full((rows,), top_p, device="cuda"),
            )

            def filtered(spiky: Tensor = spiky, filters: Filters = filters) -> Tensor:
                floor = thresholds(spiky, filters, temperature=heat)
                return draw(spiky, keys, many, temperature=heat, floor=floor)

            yield Bench(f"{name} and draw, {shape}, {at}", filtered, 1, size)
    yield Bench(f"score_tokens top 5, {at}", lambda: score_tokens(logits, many, 5), 1, size)


def block_ops() -> Iterator[Bench]:
    """Moves and digest of 64-token blocks of Qwen3-8B, and of small blocks."""
    for width, count in ((9 << 20, 32), (64 << 10, 2048)):
        kv_cache = torch.randint(0, 256, (4 * count, width), dtype=torch.uint8, device="cuda")
        ids = torch.randperm(4 * count, device="cuda")[:count]
        slot = torch.empty(count, width, dtype=torch.uint8, device="cuda")
        name = f"{count} blocks of {width >> 10} KiB"

        def there(kv_cache: Tensor = kv_cache, ids: Tensor = ids, slot: Tensor = slot) -> None:
            pack(kv_cache, ids, slot)

        def back(kv_cache: Tensor = kv_cache, ids: Tensor = ids, slot: Tensor = slot) -> None:
            unpack(slot, ids, kv_cache)

        yield Bench(f"pack {name}", there, 1, 2 * count * width)
        yield Bench(f"unpack {name}", back, 1, 2 * count * width)
        total = torch.zeros(1, dtype=torch.int64, device="cuda")
        yield Bench(f"digest {name}", partial(add_digest, slot.view(-1), total), 1, count * width)


def main() -> None:
    """Time everything, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    groups = [layer_ops(tokens) for tokens in (1, 64, 8192)]
    groups += [sampling_ops(1, torch.bfloat16)]
    groups += [sampling_ops(64, dtype) for dtype in (torch.bfloat16, torch.float32)]
    found = []
    for bench in (bench for group in [*groups, block_ops()] for bench in group):
        if args.only in bench.name:
            us = replay_us(bench.run, bench.calls)
            floor = bench.bytes / READ_RATE
            found.append({"case": bench.name, "us": us, "bytes": bench.bytes, "roofline_us": floor})
            print(f"{bench.name:60} {us:8.1f} µs, bytes alone {floor:8.2f} µs", flush=True)
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
