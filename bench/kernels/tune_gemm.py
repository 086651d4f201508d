"""Make a device's table of products with few rows: python bench/kernels/tune_gemm.py --out TABLE.

Every form that fits is timed against cuBLAS on weights that no cache holds, in replays of a CUDA
graph; the fastest stays, or null where cuBLAS is. The table goes to
kernels/tandem/kernels/gemm/tables/<device>.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path

import torch
import triton
from torch import Tensor
from torch.nn.functional import linear

from tandem.kernels.gemm.table import ROW_CLASSES, Form
from tandem.kernels.gemm.triton import fits, launch

MODELS: dict[str, dict[str, tuple[int, int, int]]] = {
    "qwen3-8b": {
        "qkv": (6144, 4096, 36),
        "o": (4096, 4096, 36),
        "gate_up": (24576, 4096, 36),
        "down": (4096, 12288, 36),
        "head": (151936, 4096, 1),
    },
    "llama-3.1-8b": {
        "qkv": (6144, 4096, 32),
        "o": (4096, 4096, 32),
        "gate_up": (28672, 4096, 32),
        "down": (4096, 14336, 32),
        "head": (128256, 4096, 1),
    },
}
"""Outputs, inner size and number of each product in a step."""
POOL = 3 << 30
"""Numbers of the pool that weights are cut from: 6 GB, a hundred times the L2."""
MARGIN = 0.99
"""A form must beat cuBLAS by more than noise."""


def forms(rows: int) -> Iterator[Form]:
    """Every form that is tried for a row class, whatever the shape."""
    if rows == 1:
        for outputs, inner, warps in itertools.product((1, 2, 4, 8), (1024, 2048, 4096), (4, 8)):
            if 2048 <= outputs * inner <= 16384:
                yield Form(outputs, inner, warps=warps)
        return
    tiles = ((16, 128), (16, 256), (32, 64), (32, 128), (32, 256), (64, 64), (64, 128), (64, 256))
    for (outputs, inner), split, stages in itertools.product(
        (*tiles, (128, 64), (128, 128)), (1, 2, 4, 8), (3, 4, 6)
    ):
        stage = (outputs + rows) * inner * 2
        if 24 << 10 <= stage * stages <= 200 << 10:
            yield Form(outputs, inner, split, stages, warps=2 if outputs == 16 else 4)


def worth(form: Form, outputs: int, inner: int, rows: int) -> bool:
    """Whether a form fits a shape and puts enough but not too many programs to work."""
    programs = outputs // form.outputs * form.split
    most = 10**6 if rows == 1 else 2400
    return fits(form, outputs, inner, rows) and 96 <= programs <= most


def compile_one(case: tuple[int, Form]) -> None:
    """Compile a form in a process of its own; the compiled kernel is found on disk afterwards."""
    rows, form = case
    x = torch.zeros(rows, form.inner * form.split, dtype=torch.bfloat16, device="cuda")
    weight = torch.zeros(form.outputs * 16, x.shape[1], dtype=torch.bfloat16, device="cuda")
    try:
        launch(x, weight, form)
        torch.cuda.synchronize()
    except Exception as problem:
        print(rows, form, str(problem)[:80], flush=True)


def time_us(run: Callable[[], object], calls: int) -> float:
    """Median µs of a call over five replays of a graph of `calls`."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    times = []
    for _ in range(5):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / calls)
    return sorted(times)[2]


def measure(pool: Tensor, outputs: int, inner: int, rows: int) -> dict[str, object]:
    """One entry of the table."""
    calls = min(24, POOL // (outputs * inner))
    weights = [w.view(outputs, inner) for w in pool[: calls * outputs * inner].chunk(calls)]
    x = torch.randn(rows, inner, dtype=torch.bfloat16, device="cuda")
    cublas = time_us(lambda: [linear(x, w) for w in weights], calls)
    found: list[tuple[float, Form]] = []
    for form in forms(rows):
        if worth(form, outputs, inner, rows):
            try:
                us = time_us(lambda form=form: [launch(x, w, form) for w in weights], calls)
            except Exception as problem:
                print(form, str(problem)[:80], flush=True)
                continue
            found.append((us, form))
    found.sort(key=lambda f: f[0])
    us, best = found[0]
    return {
        "outputs": outputs,
        "inner": inner,
        "rows": rows,
        "form": asdict(best) if us < MARGIN * cublas else None,
        "us": round(us, 2),
        "cublas_us": round(cublas, 2),
    }


def main() -> None:
    """Compile in parallel, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["qwen3-8b"], choices=list(MODELS))
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROW_CLASSES))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    args = parser.parse_args()
    cases = [(rows, form) for rows in args.rows for form in forms(rows)]
    with ProcessPoolExecutor(args.processes, get_context("spawn")) as workers:
        list(workers.map(compile_one, cases, chunksize=4))
    print(f"compiled {len(cases)} forms", flush=True)
    pool = torch.empty(POOL, dtype=torch.bfloat16, device="cuda")
    for part in pool.split(1 << 28):
        part.normal_()
    entries: dict[tuple[int, int, int], dict[str, object]] = {}
    for model, rows in itertools.product(args.models, args.rows):
        total = {"us": 0.0, "cublas_us": 0.0}
        for name, (outputs, inner, count) in MODELS[model].items():
            key = (outputs, inner, rows)
            entry = entries.get(key) or entries.setdefault(key, measure(pool, *key))
            us = entry["us"] if entry["form"] else entry["cublas_us"]
            total["us"] += count * us / 1e3
            total["cublas_us"] += count * entry["cublas_us"] / 1e3
            rate = outputs * inner * 2 / us / 1e6
            print(
                f"{model} {rows:3} rows {name:8} cuBLAS {entry['cublas_us']:6.1f} µs, best "
                f"{entry['us']:6.1f} µs, {rate:.2f} TB/s {entry['form']}",
                flush=True,
            )
        print(
            f"{model} {rows:3} rows: cuBLAS {total['cublas_us']:.3f} ms, "
            f"with the table {total['us']:.3f} ms",
            flush=True,
        )
    if args.out:
        command = "python bench/kernels/tune_gemm.py --models " + " ".join(args.models)
        table = {
            "device": torch.cuda.get_device_name(),
            "command": command,
            "versions": {"torch": torch.__version__, "triton": triton.__version__},
            "entries": list(entries.values()),
        }
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
