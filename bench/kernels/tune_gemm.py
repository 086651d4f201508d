"""Make a device's table of products with few rows: python bench/kernels/tune_gemm.py --out TABLE.

Every form that fits is timed on weights that no cache holds, each product behind a norm (as most
are in a step: what a form fetches while that runs counts), in replays of a CUDA graph, against
cuBLAS or, where it folds its neighbours in, against the ops one after the other; the fastest stays,
or null where doing without is. The table goes to
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
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn.functional import linear

from tandem.kernels.activation import silu_and_mul
from tandem.kernels.gemm.gluon import ring_fits
from tandem.kernels.gemm.table import ROW_CLASSES, Form, Kind
from tandem.kernels.gemm.triton import MOST_ROWS, fits, launch
from tandem.kernels.norm import rms_norm

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
GATED = "gate_up"
"""What is also tried with the activation folded in."""
POOL = 3 << 30
"""Numbers of the pool that weights are cut from: 6 GB, a hundred times the L2."""
MARGIN = 0.99
"""A form must win by more than noise."""
Multiply = Callable[[Tensor, Tensor], Tensor]


def forms(rows: int) -> Iterator[Form]:
    """Every form that is tried for a row class, whatever the shape."""
    if rows == 1:
        for outputs, inner, warps in itertools.product((1, 2, 4, 8), (1024, 2048, 4096), (4, 8)):
            if 2048 <= outputs * inner <= 16384:
                yield Form(outputs, inner, warps=warps)
        yield from streams(rows)
        return
    yield from streams(rows)
    if rows > MOST_ROWS:
        return
    tiles = ((16, 128), (16, 256), (32, 64), (32, 128), (32, 256), (64, 64), (64, 128), (64, 256))
    for (outputs, inner), split, stages in itertools.product(
        (*tiles, (128, 64), (128, 128)), (1, 2, 4, 8), (3, 4, 6)
    ):
        stage = (outputs + rows) * inner * 2
        if 24 << 10 <= stage * stages <= 200 << 10:
            yield Form(outputs, inner, split, stages, warps=2 if outputs == 16 else 4)


def streams(rows: int) -> Iterator[Form]:
    """Forms of the kernel for Hopper, with as long a ring as fits."""
    if torch.cuda.get_device_capability()[0] != 9:
        return
    tiles = ((64, 64), (64, 128), (64, 256), (128, 64), (128, 128), (128, 256))
    for (outputs, inner), split, group in itertools.product(tiles, (1, 2, 4), (1, 2, 3, 4)):
        rings = (
            Form(outputs, inner, split, stages, stream=True, group=group)
            for stages in range(12, 2, -1)
        )
        yield from itertools.islice((form for form in rings if ring_fits(form, rows)), 1)


def worth(form: Form, kind: Kind, outputs: int, inner: int, rows: int) -> bool:
    """Whether a form fits a shape and puts enough but not too many programs to work."""
    programs = outputs // form.outputs // form.group * form.split
    most = 400 if form.stream and form.split > 1 else 10**6 if rows == 1 else 2400
    return fits(form, kind, outputs, inner, rows) and 64 <= programs <= most


def compile_one(case: tuple[int, Kind, Form]) -> None:
    """Compile a form in a process of its own; the compiled kernel is found on disk afterwards."""
    rows, kind, form = case
    x = torch.zeros(rows, form.inner * form.split, dtype=torch.bfloat16, device="cuda")
    weight = torch.zeros(
        form.outputs * form.group * 16, x.shape[1], dtype=torch.bfloat16, device="cuda"
    )
    try:
        folded(kind, form)(x, weight)
        torch.cuda.synchronize()
    except Exception as problem:
        print(rows, kind, form, str(problem)[:80], flush=True)


def folded(kind: Kind, form: Form) -> Multiply:
    """The product with what its kind folds in."""
    return lambda x, w: launch(x, w, form, gated=kind is Kind.GATED)


def unfolded(kind: Kind, plain: Multiply) -> Multiply:
    """The same by ops one after the other."""
    return linear if kind is Kind.PLAIN else lambda x, w: silu_and_mul(plain(x, w))


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


def measure(
    pool: Tensor, kind: Kind, outputs: int, inner: int, rows: int, plain: Multiply
) -> dict[str, Any]:
    """One entry of the table; `plain` is the fastest product without a neighbour."""
    calls = min(24, POOL // (outputs * inner))
    weights = [w.view(outputs, inner) for w in pool[: calls * outputs * inner].chunk(calls)]
    x = torch.randn(rows, inner, dtype=torch.bfloat16, device="cuda")
    gain = torch.ones(inner, dtype=torch.bfloat16, device="cuda")

    def timed(multiply: Multiply) -> float:
        return time_us(lambda: [multiply(rms_norm(x, gain, 1e-6), w) for w in weights], calls)

    without = timed(unfolded(kind, plain))
    found: list[tuple[float, Form]] = []
    for form in forms(rows):
        if worth(form, kind, outputs, inner, rows):
            try:
                found.append((timed(folded(kind, form)), form))
            except Exception as problem:
                print(form, str(problem)[:80], flush=True)
    us, best = min(found, key=lambda f: f[0])
    return {
        "kind": kind.value,
        "outputs": outputs,
        "inner": inner,
        "rows": rows,
        "form": asdict(best) if us < MARGIN * without else None,
        "us": round(us, 2),
        "without_us": round(without, 2),
    }


def measure_all(pool: Tensor, model: str, rows: int, entries: dict[Any, Any]) -> None:
    """Every product of a model at a row class, into `entries`; prints the sum over a step."""
    total, cublas = 0.0, 0.0
    for name, (outputs, inner, count) in MODELS[model].items():
        plain: Multiply = linear
        for kind in Kind if name == GATED else (Kind.PLAIN,):
            key = (kind, outputs, inner, rows)
            if key not in entries:
                entries[key] = measure(pool, *key, plain)
            entry = entries[key]
            best = entry["us"] if entry["form"] else entry["without_us"]
            if kind is Kind.PLAIN:
                total += count * best / 1e3
                cublas += count * entry["without_us"] / 1e3
                if entry["form"]:
                    plain = folded(kind, Form(**entry["form"]))
            print(
                f"{model} {rows:3} rows {name:8} {kind:6} without {entry['without_us']:6.1f} µs, "
                f"best {entry['us']:6.1f} µs, {outputs * inner * 2 / best / 1e6:.2f} TB/s "
                f"{entry['form']}",
                flush=True,
            )
    print(
        f"{model} {rows:3} rows: cuBLAS {cublas:.3f} ms, with the table {total:.3f} ms", flush=True
    )


def main() -> None:
    """Compile in parallel, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["qwen3-8b"], choices=list(MODELS))
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROW_CLASSES))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    args = parser.parse_args()
    cases = [
        (rows, kind, form)
        for rows, kind in itertools.product(args.rows, Kind)
        for form in forms(rows)
        if fits(form, kind, form.outputs * form.group * 16, form.inner * form.split, rows)
    ]
    with ProcessPoolExecutor(args.processes, get_context("spawn")) as workers:
        list(workers.map(compile_one, cases, chunksize=4))
    print(f"compiled {len(cases)} forms", flush=True)
    pool = torch.empty(POOL, dtype=torch.bfloat16, device="cuda")
    for part in pool.split(1 << 28):
        part.normal_()
    entries: dict[Any, dict[str, Any]] = {}
    for model, rows in itertools.product(args.models, args.rows):
        measure_all(pool, model, rows, entries)
    if args.out:
        command = "python bench/kernels/tune_gemm.py --models " + " ".join(args.models)
        table = {
            "device": torch.cuda.get_device_name(),
            "command": command,
            "versions": {"torch": torch.__version__, "triton": triton.__version__},
            "entries": list(entries.values()),
        }
        args.out.parent.mkdir(parents=True, exist_ok=True)
        kept = json.loads(args.out.read_text()) if args.out.exists() else {"many_rows": []}
        args.out.write_text(json.dumps(kept | table, indent=1) + "\n")


if __name__ == "__main__":
    main()
