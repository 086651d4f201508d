"""How far the simulation is from what two H100s did: the rows of bench/results/pair_h100.json."""

from __future__ import annotations

import json
from pathlib import Path

from bench.sim.figures import figures
from bench.sim.loads import alone, uniform
from bench.sim.stack import SHAPES, Stack

MEASURED = Path(__file__).parents[1] / "results" / "pair_h100.json"
ROWS = {
    "load, default settings": "1P1D conditional",
    "load, two aggregated workers": "two aggregated",
}
NAMES = {
    "ttft p50": "ttft_p50",
    "ttft p90": "ttft_p90",
    "tpot p50": "tpot_p50",
    "itl p50": "itl_p50",
    "itl p99": "itl_p99",
    "second p50": "second_p50",
    "second p90": "second_p90",
}
REPLICAS = {
    "18/s": {"ttft p50": 137, "ttft p90": 216, "tpot p50": 18.1, "itl p50": 12.1, "itl p99": 60.6},
    "24/s": {"ttft p50": 288, "ttft p90": 943, "tpot p50": 29.5, "itl p50": 30.0, "itl p99": 79.4},
}
"""Of bench/results/pair_h100.md: the JSON has no row of them."""
PROMPTS, RATES = 360, (18, 24)
Row = tuple[str, str, float, float]
"""(run, figure, measured, simulated), milliseconds."""


def compared() -> list[Row]:
    """Every figure that was measured, beside what the simulation gives for the same arrivals."""
    known = json.loads(MEASURED.read_text())
    rows = _one_by_one(known)
    for name, shape in ROWS.items():
        for number, rate in enumerate(RATES):
            load = uniform(rate, PROMPTS, number + 1)
            found = figures(load(Stack(SHAPES[shape]))).row()
            measured = known.get(name, REPLICAS)[f"{rate}/s"]
            rows += [
                (f"{shape}, {rate}/s", figure, measured[figure], found[ours])
                for figure, ours in NAMES.items()
                if figure in measured
            ]
    return rows


def _one_by_one(known: dict[str, dict[str, dict[str, dict[str, dict[str, float]]]]]) -> list[Row]:
    rows: list[Row] = []
    for length, measured in known["one by one"]["times"].items():
        median = measured["median"]
        for shape, key in (("two aggregated", "alone"), ("1P1D strict", "pair")):
            found = figures(alone(int(length))(Stack(SHAPES[shape])))
            run = f"{shape}, {length} tokens alone"
            rows.append((run, "ttft p50", median[f"ttft_{key}_ms"], found.ttft_p50))
            rows.append((run, "second p50", median[f"second_token_{key}_ms"], found.second_p50))
    return rows


def table(rows: list[Row]) -> str:
    """In Markdown."""
    lines = ["| run | figure | measured, ms | simulated, ms | error |", "|---|---|---|---|---|"]
    for run, figure, measured, simulated in rows:
        error = f"{100 * (simulated / measured - 1):+.0f} %"
        lines.append(f"| {run} | {figure} | {measured:.1f} | {simulated:.1f} | {error} |")
    return "\n".join(lines)
