"""Steps of prompts beside decodes, forecast and taken: python -m bench.engine.mixed --out FOLDER.

One engine in this process with --max-itl-ms gets the simulator's mixed load in real time. Each
step is noted: what it held, what the engine forecast for it, what the host saw it take. Prints how
far forecasts were off, and how often steps with prompts were over the bound. Needs a CUDA device;
writes mixed.json, one row a step: when it was through, decodes, their contexts, prompt tokens, rows
of prompts, prompt tokens as counted, the forecast, what it took (s).

``--replay mixed.json`` needs no device. It fits the recorded steps by what each was padded to
(``--classes`` says by which graphs: those of the recording's build, or today's), and has today's
planner fill the recorded steps on a device that takes as long, with the scatter that was left.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from bench.sim import loads
from bench.sim.loads import KINDS, PHASE, SHARES

sys.path.insert(0, str(Path(__file__).parent))

from rig import Rig

from tandem.engine.kv_memory import StepSize
from tandem.engine.scheduler.chunks import cost_behind
from tandem.engine.scheduler.padding import Padding, StepRoom
from tandem.engine.scheduler.step_times import MeasuredSteps
from tandem.engine.worker.graphs import StepGraphs, step_shapes
from tandem.protocol.steps import Crowd, seconds_at

LEAST_FIT = 128
"""Prompt tokens of a step that a line is fitted through: smaller ones read weights for longer."""
FLOOR = 1.17
"""Of its decodes' time, what the smallest steps of both took."""
COLUMNS = ("at", "decodes", "context", "prompt", "chunks", "weight", "forecast", "took")


def watch(rig: Rig) -> list[tuple[float, ...]]:
    """A row for each step from now on."""
    rows: list[tuple[float, ...]] = []
    notes = rig.core._notes
    measured, plain = rig.core.scheduler.measured, notes.note

    def note(plan: Any, seconds: float, now: float) -> None:
        decodes = [row for row in plan.rows if row.num_tokens == 1]
        chunks = [row for row in plan.rows if row.num_tokens > 1]
        crowd = Crowd(len(decodes), sum(row.num_computed for row in decodes))
        steepness = measured.steepness
        weight = round(
            sum(cost_behind(row.num_computed, row.num_tokens, steepness) for row in chunks)
        )
        added = seconds_at(measured.prompt_steps, weight) if weight else 0.0
        forecast = measured.decode_seconds(crowd) + added
        tokens = sum(row.num_tokens for row in chunks)
        rows.append((now, *crowd, tokens, len(chunks), weight, forecast, seconds))
        plain(plan, seconds, now)

    notes.note = note  # type: ignore[method-assign]
    return rows


def arrivals(rate: float, seconds: float, seed: int) -> list[tuple[float, int, int]]:
    """Seconds, prompt and answer of the mixed load, as ``bench.sim.loads`` draws them."""
    draw = random.Random(seed)
    found, at = [], 0.0
    while at < seconds:
        at += draw.expovariate(rate)
        kind = draw.choices(KINDS, SHARES[int(at / PHASE) % len(SHARES)])[0]
        length = max(16, round(kind.tokens_in * draw.uniform(0.5, 1.5)))
        found.append((at, length, max(4, round(kind.out * draw.uniform(0.5, 1.5)))))
    return found


def drive(rig: Rig, todo: list[tuple[float, int, int]]) -> list[list[float]]:
    """Send what is due between steps, to the end; gaps between tokens, a list for each request."""
    last: dict[str, float] = {}
    gaps: dict[str, list[float]] = {}
    zero, left = time.perf_counter(), todo[::-1]
    while left or rig.core.has_work:
        now = time.perf_counter()
        while left and left[-1][0] <= now - zero:
            _, length, out = left.pop()
            rig.add(length, out)
        if not rig.core.has_work:
            time.sleep(0.0005)
            continue
        outputs = [each for some in rig.step().outputs.values() for each in some]
        now = time.perf_counter()
        for each in outputs:
            if each.request in last:
                gaps.setdefault(each.request, []).append(now - last[each.request])
            last[each.request] = now
    return list(gaps.values())


def told(rows: list[tuple[float, ...]], gaps: list[list[float]], bound: float) -> dict[str, Any]:
    """Percentiles, ms and shares."""
    table = np.array(rows)
    decodes, prompt, forecast, took = table[:, 1], table[:, 3], table[:, 6], table[:, 7]
    mixed = (decodes > 0) & (prompt > 0) & (forecast > 0)
    ratio = took[mixed] / forecast[mixed]
    every = np.concatenate([np.array(each) for each in gaps])
    late = [sum(gap > 0.025 for gap in each) > max(1, 0.01 * len(each)) for each in gaps]
    return {
        "steps": len(rows),
        "mixed": int(mixed.sum()),
        "took over forecast p10 p50 p90 p99": np.percentile(ratio, (10, 50, 90, 99)).tolist(),
        "mixed took ms p50 p90 p99": (np.percentile(took[mixed], (50, 90, 99)) * 1e3).tolist(),
        "mixed over bound": float((took[mixed] > bound).mean()),
        "prompt tokens of mixed p50": float(np.median(prompt[mixed])),
        "gaps ms p50 p99": (np.percentile(every, (50, 99)) * 1e3).tolist(),
        "requests with late gaps": float(np.mean(late)),
        "prompt tokens a second": float(prompt.sum() / (table[-1, 0] - table[0, 0])),
    }


def todays() -> Padding:
    """Graphs that a GPU's engine captures by default."""
    graphs = StepGraphs()
    graphs.offer(step_shapes(max_rows=256, max_tokens=8192, max_captured=2048))
    return Padding(graphs.sizes)


def coarse() -> Padding:
    """Those of mixed steps before sizes were 128 apart (01804bb)."""
    pairs = [(d, n) for d in (16, 64, 128, 256) for n in (64, 128, 256, 512) if n <= 4 * d]
    pairs += [(16, 768), (16, 1024), (64, 1024), (128, 768), (128, 1024)]
    return Padding([StepSize(d, n, 8) for d, n in sorted(pairs, key=sum)])


def replay(kept: dict[str, Any], recorded: Padding, bound: float) -> dict[str, Any]:
    """Today's planner on the recorded steps: how often it is over, and how wide its steps are."""
    table = np.array([row for row in kept["rows"] if row[1] and row[3] >= LEAST_FIT and row[6]])
    decodes, context, prompt, chunks = (table[:, at] for at in (1, 2, 3, 4))
    padded = np.array(
        [
            recorded.tokens(int(d), int(n), int(c)) or d + n
            for d, n, c in zip(decodes, prompt, chunks, strict=True)
        ]
    )
    seen = np.maximum(0, table[:, 5] - prompt)
    columns = np.column_stack((np.ones(len(table)), context, padded, seen))
    factors = np.linalg.lstsq(columns, table[:, 7], rcond=None)[0]
    scatter = table[:, 7] / (columns @ factors)
    alone = np.array([row for row in kept["rows"] if row[1] and not row[3]])
    pure = np.column_stack((np.ones(len(alone)), alone[:, 1], alone[:, 2]))
    decode = np.linalg.lstsq(pure, alone[:, 7], rcond=None)[0]
    draw, steps, graphs = random.Random(1), MeasuredSteps(), todays()
    took, wide = [], []
    for number in range(20 * len(table)):
        row = number % len(table)
        crowd = Crowd(int(decodes[row]), int(context[row]))
        before = float(decode @ (1.0, *crowd))
        steps.note(crowd, 0, before * draw.gauss(1.0, 0.03))
        budget = steps.prompt_tokens_within(crowd, bound, 16384)
        count = StepRoom(graphs, crowd.streams, budget, 0.0).most(0, 8192)
        weight = graphs.weight(crowd.streams, count, 1)
        shape = (1.0, crowd.context, crowd.streams + weight, 0.0)
        seconds = max(FLOOR * before, float(factors @ shape)) * float(draw.choice(scatter))
        steps.note(crowd, weight, seconds)
        if number >= 4 * len(table):  # learned by then
            took.append(seconds)
            wide.append(count)
    return {
        "recorded over fit p1 p50 p99": np.percentile(scatter, (1, 50, 99)).tolist(),
        "mixed took ms p50 p90 p99": (np.percentile(took, (50, 90, 99)) * 1e3).tolist(),
        "mixed over bound": float((np.array(took) > bound).mean()),
        "mixed over 25 ms": float((np.array(took) > 0.025).mean()),
        "prompt tokens of mixed p50": float(np.median(wide)),
        "margin": steps.margin,
    }


def main() -> None:
    """Start, warm up, send."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--rate", type=float, default=7.0)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--max-itl-ms", type=float, default=21.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--replay", type=Path, help="steps of an earlier run, instead of a device")
    parser.add_argument("--classes", choices=("coarse", "todays"), default="todays")
    args = parser.parse_args()
    if args.replay is not None:
        kept = json.loads(args.replay.read_text())
        recorded = coarse() if args.classes == "coarse" else todays()
        print(json.dumps(replay(kept, recorded, args.max_itl_ms / 1e3), indent=1))
        return
    args.out.mkdir(parents=True, exist_ok=True)
    rig = Rig.start(max_model_len=32768, max_itl_ms=args.max_itl_ms)
    rows = watch(rig)
    drive(rig, [(0.0, 2048, 128)] * loads.WARMUPS)
    rows.clear()
    gaps = drive(rig, arrivals(args.rate, args.seconds, args.seed))
    found = told(rows, gaps, args.max_itl_ms / 1e3)
    print(json.dumps(found, indent=1), flush=True)
    kept = {"columns": COLUMNS, "told": found, "rows": rows}
    (args.out / "mixed.json").write_text(json.dumps(kept) + "\n")


if __name__ == "__main__":
    main()
