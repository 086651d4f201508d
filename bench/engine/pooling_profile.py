"""Where the time of prompts that are pooled goes: what the host does, and when the device waits.

    python bench/engine/pooling_profile.py MODEL ... [--prompts 512 --tokens 512] [--enforce-eager]

A MODEL as of pooling.py, an encoder. Of the layers alone and of vectors: milliseconds of some
rounds, the device's kernels by torch's profiler, how long it was busy and how long it waited
between two kernels; of vectors also what planning, launching and updating take the host.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parent))
from pooling_shapes import SHAPES, dummy_folder, layers_alone

from tandem.engine.executor.uniproc import UniProcExecutor
from tandem.llm import LLM

GAP_US = 20
"""Between kernels, from which on the device is said to wait."""


def main() -> None:
    """Print."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--enforce-eager", action="store_true")
    args = parser.parse_args()
    for model in args.models:
        print(f"== {model}{' eager' if args.enforce_eager else ''}", flush=True)
        of_model(model, args)


def of_model(model: str, args: argparse.Namespace) -> None:
    """One model's lines."""
    draw = random.Random(0)
    executor = UniProcExecutor()
    folder = str(dummy_folder(model)) if model in SHAPES else model
    options: dict[str, Any] = {"load_format": "dummy" if model in SHAPES else "auto"}
    options |= {"device": "cuda", "enforce_eager": args.enforce_eager, "executor": executor}
    with LLM(folder, enable_prefix_caching=False, **options) as llm:
        high = min(30_000, llm.card.vocab_size)
        prompts = [
            [draw.randrange(100, high) for _ in range(args.tokens)] for _ in range(args.prompts)
        ]
        worker = executor.worker
        ways: dict[str, Callable[[], object]] = {
            "layers alone": lambda: layers_alone(worker, worker._config, prompts),
            "vectors": lambda: llm.embed(prompts),
        }
        for name, run in ways.items():
            rounds(name, run, args.rounds)
        core: Any = llm.engine._llm._client
        told = timed(core._core)
        ways["vectors"]()
        print("  host ms:", {name: round(1e3 * spent, 1) for name, spent in told.items()})
        for name, run in ways.items():
            print(f"  {name}:")
            kernels(run)


def rounds(name: str, run: Callable[[], object], count: int) -> None:
    """Milliseconds of each, but the first."""
    run()
    took = []
    for _ in range(count):
        started = time.perf_counter()
        run()
        took.append(round(1e3 * (time.perf_counter() - started)))
    print(f"  {name}: {took} ms", flush=True)


def timed(core: Any) -> dict[str, float]:
    """Seconds spent in the engine's parts from now on."""
    told: dict[str, float] = defaultdict(float)
    parts = ((core.scheduler, "plan"), (core._executor, "execute"), (core, "_update"))
    for owner, name in (*parts, (core, "observe")):
        setattr(owner, name, _measured(getattr(owner, name), told, name))
    return told


def _measured(
    of: Callable[..., object], told: dict[str, float], name: str
) -> Callable[..., object]:
    def measured(*args: object) -> object:
        started = time.perf_counter()
        try:
            return of(*args)
        finally:
            told[name] += time.perf_counter() - started

    return measured


def kernels(run: Callable[[], object]) -> None:
    """What the device does, and does not."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    times: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    spans = []
    for event in seen.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times[event.name[:80]] += event.time_range.elapsed_us()
            counts[event.name[:80]] += 1
            spans.append((event.time_range.start, event.time_range.end))
    spans.sort()
    first, end, busy, waits = spans[0][0], spans[0][0], 0.0, 0.0
    for begin, over in spans:
        waits += begin - end if begin - end > GAP_US else 0
        busy += max(0.0, over - max(begin, end))
        end = max(end, over)
    print(f"    {(end - first) / 1e3:.1f} ms, busy {busy / 1e3:.1f}, waits {waits / 1e3:.1f}")
    for name, us in sorted(times.items(), key=lambda each: -each[1])[:12]:
        print(f"    {us / 1e3:9.2f} ms {counts[name]:6d} x {us / counts[name]:7.1f} us  {name}")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
