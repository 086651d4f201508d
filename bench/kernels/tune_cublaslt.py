"""Which of cuBLASLt's algorithms multiplies many rows: python bench/kernels/tune_cublaslt.py.

Measured on a card that is at its power limit, as prompts in a row bring it there: one algorithm
after the other without a pause, in an order drawn anew each round, random numbers in x and weights.
--pause-ms N lets the card rest before each burst, as a prompt that comes alone finds it.
--table FILE writes the choices into a device's table (kernels/tandem/kernels/gemm/tables/).
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from gemm_models import MODELS
from torch import Tensor
from torch.nn.functional import linear
from tune_gemm import text_of

from tandem.kernels.gemm.cublaslt import Library, Shape
from tandem.kernels.gemm.table import Algorithm

PRODUCTS = ("qkv", "gate_up")
"""Those without a residual, which cuBLAS adds."""
ROWS = (1024, 1536, 2048, 3072, 4096, 6144, 8192)
NOISE = 0.01
WARM_S, TIMED_S = 0.02, 0.05
LAYERS = 6
"""Weights in turn, so that none is in L2."""
Multiply = Callable[[Tensor], object]
Times = dict[Algorithm | None, float]
"""µs of a product; None is cuBLAS's own choice."""


def burst_us(multiply: Multiply, weights: list[Tensor], operations: int, seconds: float) -> float:
    """Mean µs of a product of so many operations, over about so many seconds of them."""
    calls = max(LAYERS, int(seconds * 600e12 / operations))
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for call in range(calls):
        multiply(weights[call % LAYERS])
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) * 1e3 / calls


def measure(
    library: Library, outputs: int, inner: int, rows: int, rounds: int, pause: float = 0.0
) -> Times:
    """Every algorithm that the library offers for so many rows, and its own choice through torch,
    in bursts after so many seconds of rest, or without any.

    Raises AssertionError for one that gives another product.
    """
    weights = [
        torch.randn(outputs, inner, dtype=torch.bfloat16, device="cuda") for _ in range(LAYERS)
    ]
    x = torch.randn(rows, inner, dtype=torch.bfloat16, device="cuda")
    operations = 2 * rows * outputs * inner
    ways: dict[Algorithm | None, Multiply] = {None: lambda w: linear(x, w)}
    wanted = linear(x, weights[0]).float()
    for each, product in library.products(Shape(outputs, inner, x.dtype), rows):
        ways[each] = lambda w, product=product: product(x, w)
        error = (product(x, weights[0]).float() - wanted).norm() / wanted.norm()
        assert error < 4e-3, f"{each} is off by {error:.1e}"
    if not pause:
        burst_us(ways[None], weights, operations, 0.3)
    seen: dict[Algorithm | None, list[float]] = {each: [] for each in ways}
    for _ in range(rounds):
        for each in random.sample(list(ways), len(ways)):
            if pause:
                time.sleep(pause)
            else:
                burst_us(ways[each], weights, operations, WARM_S)
            seen[each].append(burst_us(ways[each], weights, operations, TIMED_S))
    return {each: statistics.median(times) for each, times in seen.items()}


def choices(found: dict[int, Times]) -> list[tuple[int, Algorithm | None]]:
    """The fewest rows of each range, and what is best over both ends of it: more than noise faster
    than cuBLAS's own choice in the mean, and at neither end slower than noise."""
    chosen: list[tuple[int, Algorithm | None]] = []
    ends = [*pairwise(sorted(found)), (max(found), max(found))]
    for low, high in ends:
        offered = set(found[low]) & set(found[high])
        ratios = {
            each: [found[at][each] / found[at][None] for at in (low, high)] for each in offered
        }
        best = min(ratios, key=lambda each: math.prod(ratios[each]))
        wins = math.sqrt(math.prod(ratios[best])) < 1 - NOISE and max(ratios[best]) < 1 + NOISE
        winner = best if wins else None
        if not chosen or chosen[-1][1] != winner:
            chosen.append((low, winner))
    return chosen


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--pause-ms", type=float, default=0.0, help="rest before each burst")
    parser.add_argument("--table", type=Path, help="to write the choices into")
    parser.add_argument("--out", type=Path, help="JSON of all times")
    args = parser.parse_args()
    torch.zeros(1, device="cuda")
    library = Library()
    shapes = {MODELS[model][name][:2] for model in args.models for name in PRODUCTS}
    entries: list[dict[str, Any]] = []
    times: list[dict[str, Any]] = []
    for outputs, inner in sorted(shapes):
        found = {
            rows: measure(library, outputs, inner, rows, args.rounds, args.pause_ms / 1e3)
            for rows in args.rows
        }
        for rows, seen in found.items():
            shown = {each: 2e-6 * rows * outputs * inner / us for each, us in seen.items()}
            order = sorted(shown, key=lambda each: -shown[each])
            parts = (f"{shown[each]:.0f} {_named(each)}" for each in order[:4])
            print(
                f"{outputs} x {inner}, {rows} rows, TFLOP/s: cuBLAS {shown[None]:.0f};",
                ", ".join(parts),
                flush=True,
            )
            for each, us in seen.items():
                said = {"outputs": outputs, "inner": inner, "rows": rows, "us": round(us, 1)}
                times.append({**said, "algorithm": None if each is None else asdict(each)})
        for rows, algorithm in choices(found):
            print(f"  from {rows} rows: {_named(algorithm)}", flush=True)
            said = None if algorithm is None else asdict(algorithm)
            entries.append({"outputs": outputs, "inner": inner, "rows": rows, "algorithm": said})
    if args.out:
        args.out.write_text(json.dumps(times, indent=1) + "\n")
    if args.table:
        table = json.loads(args.table.read_text())
        args.table.write_text(text_of(table | {"many_rows": entries}))


def _named(algorithm: Algorithm | None) -> str:
    if algorithm is None:
        return "(cuBLAS)"
    return f"(tile {algorithm.tile}, cluster {algorithm.cluster})"


if __name__ == "__main__":
    main()
