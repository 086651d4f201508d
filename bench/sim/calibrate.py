"""How far the simulation is from what two H100s did: rows of bench/results/pair_h100.json,
pair_load_h100.json and elastic_h100.json, the first of another machine than the others.
"""

from __future__ import annotations

import json
from pathlib import Path

from bench.sim import loads
from bench.sim.figures import figures
from bench.sim.loads import alone, uniform
from bench.sim.stack import SHAPES, Stack
from bench.sim.sweep import load_of

MEASURED = Path(__file__).parents[1] / "results" / "pair_h100.json"
UNDER_LOAD = Path(__file__).parents[1] / "results" / "pair_load_h100.json"
GOODPUT = Path(__file__).parents[1] / "results" / "elastic_h100.json"
PAIR, TWO = "1P1D conditional", "two aggregated"
NAMES = {
    "ttft p50": "ttft_p50",
    "ttft p90": "ttft_p90",
    "tpot p50": "tpot_p50",
    "itl p50": "itl_p50",
    "itl p99": "itl_p99",
    "second p50": "second_p50",
    "second p90": "second_p90",
}
REPLICAS = {"ttft p50": 106, "ttft p90": 156, "tpot p50": 16.2, "itl p50": 11.5, "itl p99": 33.6}
"""Of two aggregated workers at 18 a second, in bench/results/pair_h100.md: no JSON has them."""
PROMPTS, RATES = 360, (18, 24)
SHAPES_BY_NAME = {
    "elastic": "1P1D elastic",
    "two bounded": "two aggregated bounded",
    "strict": "1P1D strict",
}
BUILD = "e285c39"
"""Whose rows of GOODPUT are compared: those before had coarser graphs."""
OPEN_RUNS = (("mixed", 14, 1, 5.0), ("agents", 16, 2, 4.0), ("mixed", 14, 2, 4.0))
"""Load, rate, seed, seconds for the warm-up, each of 15 s, as bench/pair/elastic.py ran them."""
Row = tuple[str, str, float, float]
"""(run, figure, measured, simulated): milliseconds, or requests a second."""


def compared() -> list[Row]:
    """Every figure that was measured, beside what the simulation gives for the same arrivals."""
    known = json.loads(MEASURED.read_text())
    rows = _one_by_one(known)
    under = json.loads(UNDER_LOAD.read_text())
    for number, rate in enumerate(RATES):
        rows += _under_load(PAIR, rate, number + 1, under[f"{rate}/s"])
    rows += _under_load(TWO, RATES[0], 1, REPLICAS)
    return rows + _within_bounds(json.loads(GOODPUT.read_text()))


def _under_load(shape: str, rate: int, seed: int, measured: dict[str, float]) -> list[Row]:
    found = figures(uniform(rate, PROMPTS, seed)(Stack(SHAPES[shape]))).row()
    return [
        (f"{shape}, {rate}/s", figure, measured[figure], found[ours])
        for figure, ours in NAMES.items()
        if figure in measured
    ]


def _within_bounds(known: dict[str, dict[str, float]]) -> list[Row]:
    rows: list[Row] = []
    settle = loads.SETTLE
    for load, rate, seed, seconds in OPEN_RUNS:
        for name, shape in SHAPES_BY_NAME.items():
            measured = known.get(f"{load}:{rate} {name}, {BUILD}, seed {seed}")
            if measured is None:
                continue
            loads.SETTLE = seconds
            found = figures(
                load_of(load, 15.0, seed, None)(rate)(Stack(SHAPES[shape], seed=seed))
            ).row()
            loads.SETTLE = settle
            run = f"{load} {rate}, seed {seed}, {name}"
            rows += [
                (run, figure.replace("_", " "), measured[figure], found[figure])
                for figure in ("goodput", "ttft_p50", "tpot_p50", "itl_p99", "second_p50")
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
    lines = ["| run | figure | measured | simulated | error |", "|---|---|---|---|---|"]
    for run, figure, measured, simulated in rows:
        error = f"{100 * (simulated / measured - 1):+.0f} %"
        lines.append(f"| {run} | {figure} | {measured:.1f} | {simulated:.1f} | {error} |")
    return "\n".join(lines)
