"""Make a device's table of products with few rows: python -m scripts.tune_gemm --out TABLE.

Every form that fits is timed on weights that no cache holds, each product behind a norm (as most
are in a step: what a form fetches while that runs counts), in replays of a CUDA graph, against
cuBLAS or, where it folds its neighbours in, against the ops one after the other; the fastest stays,
or null where doing without is. The table goes to
kernels/tandem/kernels/gemm/tables/<device>.json, beside what it holds of other shapes; `--times`
keeps what every form took, from which the rule for shapes of no table was made.
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
from tandem.kernels.gemm.form import ROW_CLASSES, Form, Kind
from tandem.kernels.gemm.gluon import ring_fits
from tandem.kernels.gemm.rule import form_of
from tandem.kernels.gemm.triton import MOST_ROWS, fits, launch
from tandem.kernels.launch import sm_count
from tandem.kernels.norm import rms_norm

POOL = 3 << 30
"""Numbers of the pool that weights are cut from: 6 GB, a hundred times the L2."""
COLD = 150 << 20
"""Numbers that the products of one measurement read at least: five times the L2."""
MARGIN = 0.99
"""A form must win by more than noise."""
MOST_CHUNKS = 40
"""Times that the plain kernel of one row writes its loop out: each takes the compiler longer."""
WIDE = 48
"""Tiles (or groups of them) of the weight that a form is compiled with."""
FEWEST = 28
"""Programs that a form puts to work at least."""
Multiply = Callable[[Tensor, Tensor], Tensor]
Entries = dict[tuple[str, int, int, int], dict[str, Any]]
Times = dict[tuple[str, int, int, int], list[tuple[float, dict[str, Any]]]]


Products = dict[str, tuple[int, int, int]]


def products(
    layers: int, hidden: int, queries: int, keys: int, inter: int, vocabulary: int
) -> Products:
    """Return the products of a dense decoder. `queries` and `keys` are heads times their size, keys
    without values."""
    return {
        "qkv": (queries + 2 * keys, hidden, layers),
        "o": (hidden, queries, layers),
        "gate_up": (2 * inter, hidden, layers),
        "down": (hidden, inter, layers),
        "head": (vocabulary, hidden, 1),
    }


MODELS: dict[str, Products] = {
    "qwen3-8b": products(36, 4096, 4096, 1024, 12288, 151936),
    "llama-3.1-8b": products(32, 4096, 4096, 1024, 14336, 128256),
    "mistral-7b": products(32, 4096, 4096, 1024, 14336, 32768),
    "qwen2.5-7b": products(28, 3584, 3584, 512, 18944, 152064),
    "qwen3-14b": products(40, 5120, 5120, 1024, 17408, 151936),
    "qwen3-4b": products(36, 2560, 4096, 1024, 9728, 151936),
    "llama-3.2-3b": products(28, 3072, 3072, 1024, 8192, 128256),
    "qwen3-1.7b": products(28, 2048, 2048, 1024, 6144, 151936),
    "qwen2.5-1.5b": products(28, 1536, 1536, 256, 8960, 151936),
    "llama-3.2-1b": products(16, 2048, 2048, 512, 8192, 128256),
    "qwen3-0.6b": products(28, 1024, 2048, 1024, 3072, 151936),
    "qwen2.5-0.5b": products(24, 896, 896, 128, 4864, 151936),
}
HELD_OUT: dict[str, Products] = {
    "smollm2-135m": products(30, 576, 576, 192, 1536, 49152),
    "smollm2-360m": products(32, 960, 960, 320, 2560, 49152),
    "smollm2-1.7b": products(24, 2048, 2048, 2048, 8192, 49152),
    "qwen2.5-3b": products(36, 2048, 2048, 256, 11008, 151936),
    "qwen2.5-14b": products(48, 5120, 5120, 1024, 13824, 152064),
}
"""In no table: what the rule for other shapes is held to (`--rule`)."""
MODELS |= HELD_OUT
GATED = "gate_up"
"""What is also tried with the activation folded in."""


def tried(key: tuple[str, int, int, int], how: argparse.Namespace) -> list[Form]:
    """Forms for one product that are worth trying, or the rule's alone."""
    kind, (_, outputs, inner, rows) = Kind(key[0]), key
    if how.rule:
        form = form_of(kind, outputs, inner, rows, sm_count(torch.device("cuda", 0)))
        return [] if form is None else [form]
    every = forms(rows, kind, streamed=how.streamed)
    return [form for form in every if worth(form, kind, outputs, inner, rows)]


def forms(rows: int, kind: Kind, *, streamed: bool = False) -> Iterator[Form]:
    """Every form that is tried for a row class, whatever the shape; from two rows on streamed ones
    alone if so asked."""
    yield from streams(rows, kind)
    if rows == 1:
        for outputs, inner in itertools.product((1, 2, 4, 8), (128, 256, 512, 1024, 2048, 4096)):
            if 1024 <= outputs * inner <= 8192:
                yield Form(outputs, inner, warps=4)
        return
    if rows > MOST_ROWS or streamed:
        return
    tiles = ((16, 128), (16, 256), (32, 64), (32, 128), (32, 256), (64, 64), (64, 128), (64, 256))
    for (outputs, inner), split, stages in itertools.product(
        (*tiles, (128, 64), (128, 128)), (1, 2, 4, 8), (3, 4, 6)
    ):
        stage = (outputs + rows) * inner * 2
        if 24 << 10 <= stage * stages <= 200 << 10:
            yield Form(outputs, inner, split, stages, warps=2 if outputs == 16 else 4)


def streams(rows: int, kind: Kind) -> Iterator[Form]:
    """Forms of the kernel for Hopper, with as long a ring as fits: either in groups or split."""
    if torch.cuda.get_device_capability()[0] != 9:
        return
    tiles = ((64, 64), (64, 128), (64, 256), (128, 64), (128, 128), (128, 256))
    splits = (2, 4, 8) if kind is Kind.PLAIN else (2,)
    ways = [(1, group) for group in (1, 2, 3, 4)] + [(split, 1) for split in splits]
    for (outputs, inner), (split, group) in itertools.product(tiles, ways):
        rings = (
            Form(outputs, inner, split, stages, stream=True, group=group)
            for stages in range(12, 2, -1)
        )
        yield from itertools.islice((form for form in rings if ring_fits(form, rows)), 1)


def worth(form: Form, kind: Kind, outputs: int, inner: int, rows: int) -> bool:
    """Return whether a form fits a shape and puts enough but not too many programs to work."""
    if not form.stream and rows == 1 and inner > MOST_CHUNKS * form.inner:
        return False
    programs = outputs // form.outputs // form.group * form.split
    most = 400 if form.stream and form.split > 1 else 10**6 if rows == 1 else 2400
    return fits(form, kind, outputs, inner, rows) and FEWEST <= programs <= most


Case = tuple[int, Kind, Form, int]


def cases_of(how: argparse.Namespace) -> list[Case]:
    """Return the cases to compile; the plain kernel of one row is built for the inner size, too."""
    found: set[Case] = set()
    for model, rows, kind in itertools.product(how.models, how.rows, Kind):
        for outputs, inner, _ in MODELS[model].values():
            for form in tried((kind.value, outputs, inner, rows), how):
                own = rows == 1 and not form.stream
                found.add((rows, kind, form, inner if own else form.inner * form.split))
    return sorted(found, key=repr)


def compile_one(case: Case) -> None:
    """Compile a form in a process of its own; the compiled kernel is found on disk afterwards."""
    rows, kind, form, inner = case
    x = torch.zeros(rows, inner, dtype=torch.bfloat16, device="cuda")
    outputs = form.outputs * form.group * WIDE
    weight = torch.zeros(outputs, inner, dtype=torch.bfloat16, device="cuda")
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


def event() -> torch.cuda.Event:
    """Return an event that records a time."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def time_us(run: Callable[[], object], calls: int) -> float:
    """Median µs of a call over five replays of a graph of `calls`."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    times: list[float] = []
    for _ in range(5):
        start, stop = event(), event()
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / calls)
    return sorted(times)[2]


def measure(
    pool: Tensor, kind: Kind, shape: tuple[int, int, int], plain: Multiply, forms: list[Form]
) -> tuple[dict[str, Any], list[tuple[float, Form]]]:
    """One entry of the table, and what each form took; `shape` is outputs, inner size and rows,
    `plain` the fastest product without a neighbour."""
    outputs, inner, rows = shape
    calls = min(max(24, COLD // (outputs * inner)), POOL // (outputs * inner))
    weights = [w.view(outputs, inner) for w in pool[: calls * outputs * inner].chunk(calls)]
    x = torch.randn(rows, inner, dtype=torch.bfloat16, device="cuda")
    gain = torch.ones(inner, dtype=torch.bfloat16, device="cuda")

    def timed(multiply: Multiply) -> float:
        return time_us(lambda: [multiply(rms_norm(x, gain, 1e-6), w) for w in weights], calls)

    without = timed(unfolded(kind, plain))
    found: list[tuple[float, Form]] = []
    for form in forms:
        try:
            found.append((timed(folded(kind, form)), form))
        except Exception as problem:
            print(form, str(problem)[:80], flush=True)
    us, best = min(found, key=lambda f: f[0], default=(without, None))
    entry = {
        "kind": kind.value,
        "outputs": outputs,
        "inner": inner,
        "rows": rows,
        "form": asdict(best) if best is not None and us < MARGIN * without else None,
        "us": round(us, 2),
        "without_us": round(without, 2),
    }
    return entry, found


def measure_all(
    pool: Tensor, model: str, rows: int, entries: Entries, times: Times, how: argparse.Namespace
) -> None:
    """Every product of a model at a row class, into `entries`; prints the sum over a step."""
    total, cublas = 0.0, 0.0
    for name, (outputs, inner, count) in MODELS[model].items():
        plain: Multiply = linear
        for kind in Kind if name == GATED else (Kind.PLAIN,):
            key = (kind.value, outputs, inner, rows)
            if key not in entries:
                entries[key], found = measure(pool, kind, key[1:], plain, tried(key, how))
                times[key] = [(round(us, 2), brief(form)) for us, form in found]
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


def brief(form: Form) -> dict[str, Any]:
    """A form's fields without those that are as by default."""
    plain = asdict(Form(0, 0))
    return {name: value for name, value in asdict(form).items() if value != plain[name]}


def merged(kept: dict[str, Any], entries: Entries, command: str) -> dict[str, Any]:
    """A table with `entries` in the place of those of the same products; the others stay."""
    others = [each for each in kept.get("entries", ()) if key_of(each) not in entries]
    said = f"{kept['command']}; later {command}" if others else command
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    every = [*others, *entries.values()]
    return {**kept, "command": said, "versions": versions, "entries": every}


def text_of(table: dict[str, Any]) -> str:
    """A table as JSON with a line for each entry."""
    parts = []
    for name, said in table.items():
        text = json.dumps(said)
        if name in ("entries", "many_rows"):
            text = "[\n  " + ",\n  ".join(map(json.dumps, said)) + "\n ]"
        parts.append(f" {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def key_of(entry: dict[str, Any]) -> tuple[str, int, int, int]:
    """Return the key of an entry."""
    return entry["kind"], entry["outputs"], entry["inner"], entry["rows"]


def compile_all(cases: list[Case], processes: int) -> None:
    """Every form that will be measured, in parallel."""
    with ProcessPoolExecutor(processes, get_context("spawn")) as workers:
        list(workers.map(compile_one, cases, chunksize=4))
    print(f"compiled {len(cases)} forms", flush=True)


def main() -> None:
    """Compile in parallel, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["qwen3-8b"], choices=list(MODELS))
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROW_CLASSES))
    parser.add_argument("--out", type=Path, help="table to write these products' entries into")
    parser.add_argument("--times", type=Path, help="file for what each form took")
    parser.add_argument(
        "--streamed", action="store_true", help="from two rows on, try streamed forms alone"
    )
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--rule", action="store_true", help="time the form of rule.py alone")
    args = parser.parse_args()
    if args.rule and args.out:
        parser.error("--rule makes no table: --times keeps what its forms took")
    compile_all(cases_of(args), args.processes)
    pool = torch.empty(POOL, dtype=torch.bfloat16, device="cuda")
    for start in range(0, POOL, 1 << 28):
        pool[start : start + (1 << 28)].normal_()
    entries: Entries = {}
    times: Times = {}
    for model, rows in itertools.product(args.models, args.rows):
        measure_all(pool, model, rows, entries, times, args)
        if args.times:
            every = [{**entries[key], "forms": found} for key, found in times.items()]
            args.times.write_text("[\n" + ",\n".join(map(json.dumps, every)) + "\n]\n")
    if args.out:
        words = " --streamed" if args.streamed else ""
        command = "python -m scripts.tune_gemm --models " + " ".join(args.models) + words
        kept = json.loads(args.out.read_text()) if args.out.exists() else {}
        args.out.parent.mkdir(parents=True, exist_ok=True)
        kept = {"device": torch.cuda.get_device_name(), "many_rows": [], **kept}
        args.out.write_text(text_of(merged(kept, entries, command)))


if __name__ == "__main__":
    main()
