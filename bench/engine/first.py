"""What a step takes that comes after a pause: python bench/engine/first.py --out FOLDER.

A prompt whose KV lies in the cache but for its last token is what a hand-off leaves to a decode
worker: one row, one token. It comes to an engine that has stood idle for a while, after which
something was done beforehand, or nothing. Times are from its arrival to its first token, in parts
of the host and of the device, and from there to the next. Needs a CUDA device; writes first.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rig import ROUTER, Rig

from tandem.engine.worker.staging import StepShape
from tandem.protocol.ids import RequestKey
from tandem.protocol.requests import EngineCoreRequest
from tandem.protocol.sampling import SamplingParams

PAUSES_S = (0.0, 0.005, 0.02, 0.1, 0.5)
ROUNDS = 12


class Timed:
    """The engine's next steps with the times of their parts."""

    def __init__(self, rig: Rig) -> None:
        self._rig, self._number = rig, 0
        self.prompts: dict[int, list[int]] = {}
        runner = rig.core._executor.worker.runner  # type: ignore[attr-defined]
        self.runner = runner
        plain_launch, plain_plan = runner.launch, rig.core.scheduler.plan
        self.marks: list[tuple[str, float]] = []
        self.events: list[tuple[Any, Any]] = []

        def launch(plan: Any) -> Any:
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            before = time.perf_counter()
            launched = plain_launch(plan)
            self.marks.append(("launch", time.perf_counter() - before))
            last.record()
            self.events.append((first, last))
            return launched

        def plan() -> Any:
            before = time.perf_counter()
            found = plain_plan()
            self.marks.append(("plan", time.perf_counter() - before))
            return found

        executor = rig.core._executor
        executor.worker.launch = launch  # type: ignore[attr-defined]
        rig.core.scheduler.plan = plan  # type: ignore[method-assign]

    def prepare(self, length: int) -> None:
        """Compute a prompt so that it is cached."""
        self.prompts[length] = [1000 + (at * 7919 + length) % 140_000 for at in range(length + 1)]
        self.ask(length)

    def ask(self, length: int) -> dict[str, float]:
        """Four tokens behind the prompt of so many: ms."""
        self._number += 1
        params = SamplingParams(temperature=0.0, seed=0, max_tokens=6, ignore_eos=True)
        key = RequestKey(ROUTER, f"first{self._number}", 0)
        self.marks.clear()
        self.events.clear()
        started = time.perf_counter()
        asked = EngineCoreRequest(key=key, prompt_token_ids=self.prompts[length], params=params)
        assert self._rig.core.add(asked) is None
        added = time.perf_counter() - started
        times = []
        while self._rig.core.has_work:
            if self._rig.core.step().outputs:
                times.append(time.perf_counter() - started)
        torch.cuda.synchronize()
        parts = {name: [s for n, s in self.marks if n == name] for name in ("plan", "launch")}
        device = [first.elapsed_time(last) for first, last in self.events]
        return {
            "add": added * 1e3,
            "plan": parts["plan"][0] * 1e3,
            "launch": parts["launch"][0] * 1e3,
            "next plan": parts["plan"][1] * 1e3,
            "next launch": parts["launch"][1] * 1e3,
            "device": device[0],
            "next device": device[1],
            "first": times[0] * 1e3,
            "second": (times[1] - times[0]) * 1e3,
            "third": (times[2] - times[1]) * 1e3,
        }


def spin(seconds: float) -> None:
    """Python for so long."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        sum(range(50))


def ways(timed: Timed) -> dict[str, Callable[[], None]]:
    """What may be done before the prompt comes."""
    runner = timed.runner
    shape = StepShape(1, 0, 0)
    x = torch.randn(256, 4096, dtype=torch.bfloat16, device="cuda")
    w = torch.randn(4096, 4096, dtype=torch.bfloat16, device="cuda")

    def kernels() -> None:
        for _ in range(60):
            x @ w
        torch.cuda.synchronize()

    @torch.inference_mode()
    def replay() -> None:
        runner.stager.stage_nothing(shape)
        runner.graphs.replay(shape)
        torch.cuda.synchronize()

    def naps() -> None:
        until = time.perf_counter() + 0.01
        while time.perf_counter() < until:
            time.sleep(2e-5)

    return {
        "nothing": lambda: None,
        "spin 5 ms": lambda: spin(0.005),
        "naps 10 ms": naps,
        "kernels 1 ms": kernels,
        "replay": replay,
        "replay, spin 2 ms": lambda: (replay(), spin(0.002))[0],
        "replay, sleep 5 ms": lambda: (replay(), time.sleep(0.005))[0],
        "replay, naps 10 ms": lambda: (replay(), naps())[0],
    }


def main() -> None:
    """Pauses with nothing, then the longest with each way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192])
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    rig = Rig.start(max_model_len=32768, enable_prefix_caching=True)
    timed = Timed(rig)
    for length in args.lengths:
        timed.prepare(length)
        for _ in range(5):
            timed.ask(length)
    found: dict[str, Any] = {}

    def measure(name: str, length: int, pause: float, way: Callable[[], None]) -> None:
        rows = []
        for _ in range(ROUNDS):
            time.sleep(pause)
            way()
            rows.append(timed.ask(length))
        found[name] = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
        print(name, {key: round(value, 2) for key, value in found[name].items()}, flush=True)
        (args.out / "first.json").write_text(json.dumps(found, indent=1) + "\n")

    for length in args.lengths:
        for pause in PAUSES_S:
            measure(f"{length}, pause {pause:g} s", length, pause, lambda: None)
    for name, way in ways(timed).items():
        measure(f"{args.lengths[0]}, 0.3 s, {name}", args.lengths[0], 0.3, way)


if __name__ == "__main__":
    main()
