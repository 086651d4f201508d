"""Paged prefill attention in useful TFLOP/s: python bench/kernels/prefill_attention.py.

Useful are the (query, key) pairs that causality leaves, 4 × head_dim operations each. --sweep tries
tunings of the Gluon kernel; --plain adds the plain Triton kernel.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from tandem.kernels.attention.prefill import gluon, triton
from tandem.kernels.measure.timing import Case, Shape, error, make_case, replay_us

SHAPE = Shape()
SCALE = SHAPE.head_dim**-0.5
Chunk = tuple[int, int]  # queries, cached context before them


def cases(wanted: str) -> dict[str, list[Chunk]]:
    """Name to the chunks of one launch."""
    out: dict[str, list[Chunk]] = {
        f"{n}": [(n, 0)] for n in (512, 1000, 2048, 4096, 8192, 16384, 30000)
    }
    out |= {
        "4 x 2048": [(2048, 0)] * 4,
        "8 x 1000": [(1000, 0)] * 8,
        "2048 after 14336": [(2048, 14336)],
        "2048 after 6100": [(2048, 6100)],
        "8192 after 8000": [(8192, 8000)],
        "mix of 6": [(2048, 6000), (512, 0), (3000, 1000), (1, 4000), (1700, 0), (900, 12000)],
    }
    return {k: v for k, v in out.items() if wanted in k}


def pairs(chunks: list[Chunk]) -> int:
    """(query, key) pairs that are looked at."""
    return sum(n * c + n * (n + 1) // 2 for n, c in chunks)


def measure(case: Case, launch: Callable[..., None], tuning: object) -> tuple[float, float]:
    """µs a layer and relative error; NaN in `out` before, so that an unwritten row shows."""
    out = torch.full_like(case.q[0], torch.nan)
    layers = case.kv_cache.shape[1]

    def step() -> None:
        batch = replace(case.batch, memo={})
        for layer in range(layers):
            launch(case.q[layer], case.layer(layer), batch, SCALE, out, tuning)

    step()
    gap = error(case, layers - 1, out, SCALE)
    return replay_us(step, layers, rest_s=0.5), gap


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    variants: list[tuple[str, Callable[..., None], object]] = [
        ("gluon", gluon.launch, gluon.DEFAULT)
    ]
    if args.sweep:
        variants += [
            (f"turns={t} regs={r}", gluon.launch, gluon.Tuning(take_turns=t, consumer_registers=r))
            for t, r in itertools.product((False, True), (240,))
        ]
    if args.plain:
        variants += [
            (f"plain {r} {k} {w} {s}", triton.launch, triton.Tuning(r, k, w, s))
            for r, k, w, s in ((64, 64, 4, 3), (128, 64, 8, 2))
        ]
    rows = []
    for name, chunks in cases(args.only).items():
        layers = 8 if sum(n for n, _ in chunks) < 20000 else 4
        case = make_case(SHAPE, [n + c for n, c in chunks], [n for n, _ in chunks], layers)
        line = []
        for label, launch, tuning in variants:
            try:
                us, gap = measure(case, launch, tuning)
            except Exception as problem:
                print(name, label, str(problem)[:300], file=sys.stderr)
                continue
            rate = 4 * SHAPE.heads * SHAPE.head_dim * pairs(chunks) / us / 1e6
            rows.append({"case": name, "kernel": label, "us": us, "tflop_s": rate, "error": gap})
            line.append(f"{label}: {rate:.0f} ({us:.0f} µs, {gap:.1e})")
        print(f"{name:18}", " | ".join(line), flush=True)
        del case
        torch.cuda.empty_cache()
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
