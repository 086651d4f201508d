"""Steps of prompts beside decodes, forecast and taken: python -m bench.engine.mixed --out FOLDER.

One engine in this process with --max-itl-ms gets the simulator's mixed load in real time. Each
step is noted: what it held, what the engine forecast for it, what the host saw it take. Prints how
far forecasts were off, and how often steps with prompts were over the bound. Needs a CUDA device;
writes mixed.json, one row a step: when it was through, decodes, their contexts, prompt tokens, rows
of prompts, prompt tokens as counted, the forecast, what it took (s).
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

from tandem.engine.scheduler.chunks import cost_behind
from tandem.protocol.steps import Crowd, seconds_at

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


def main() -> None:
    """Start, warm up, send."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--rate", type=float, default=7.0)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--max-itl-ms", type=float, default=21.0)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
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
