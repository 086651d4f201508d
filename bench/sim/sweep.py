"""Goodput of ways to place prompts on two GPUs, over kinds of load and their rates."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from bench.sim.agents import Agents, agents
from bench.sim.figures import Figures, figures
from bench.sim.loads import Load, mixed, trace, uniform
from bench.sim.stack import SHAPES, Stack

ELASTIC = "1P1D elastic"
OTHERS = ("1P1D strict", "two aggregated", "two aggregated bounded")
RATES: dict[str, tuple[float, ...]] = {
    "uniform": (10, 14, 18, 20, 22),
    "trace": (20, 30, 40),
    "mixed": (6, 10, 14, 18),
    "agents": (16, 24),
}
"""Requests a second, of agents sessions."""
UNITS = {"agents": "sessions"}
Made = Callable[[float], Load]


def load_of(name: str, seconds: float, seed: int, path: Path | None) -> Made:
    """What gives the load at a rate. ValueError where a trace's file is not said."""
    if name == "agents":
        return lambda rate: agents(Agents(round(rate), seconds=seconds), seed)
    if name == "trace":
        if path is None:
            raise ValueError("--trace: None, must be a CSV file, as the load is a trace")
        return lambda rate: trace(path, rate, max(1, round(rate * seconds)), seed)
    made = {"uniform": uniform, "mixed": mixed}[name]
    return lambda rate: made(rate, max(1, round(rate * seconds)), seed)


def sweep(
    names: list[str], seconds: float, seed: int, path: Path | None
) -> list[tuple[str, float, dict[str, tuple[Figures, dict[str, int]]]]]:
    """(load, rate, figures and ways by shape), as they come; each is said on standard error."""
    rows = []
    for name in names:
        made = load_of(name, seconds, seed, path)
        for rate in RATES[name]:
            found = {}
            for shape in (*OTHERS, ELASTIC):
                stack = Stack(SHAPES[shape], seed=seed)
                seen = figures(made(rate)(stack))
                found[shape] = seen, dict(stack.router.ways)
                print(name, rate, shape, f"{seen.goodput:.2f}", file=sys.stderr, flush=True)
            rows.append((name, rate, found))
    return rows


def table(rows: list[tuple[str, float, dict[str, tuple[Figures, dict[str, int]]]]]) -> str:
    """In Markdown: goodput of each shape, and what elastic came to."""
    lines = [
        "| load | rate | " + " | ".join((*OTHERS, ELASTIC)) + " | over the best of the others "
        "| its TTFT p50 / p90, ms | TPOT p50 | ITL p99 | pair / decode / prefill |",
        "|---" * (len(OTHERS) + 8) + "|",
    ]
    for name, rate, found in rows:
        best = max(found[each][0].goodput for each in OTHERS)
        own, ways = found[ELASTIC]
        over = f"{100 * (own.goodput / best - 1):+.0f} %" if best else "–"
        goodputs = " | ".join(f"{found[each][0].goodput:.2f}" for each in (*OTHERS, ELASTIC))
        counts = " / ".join(str(ways.get(way, 0)) for way in ("pair", "decode", "prefill"))
        lines.append(
            f"| {name} | {rate:g} {UNITS.get(name, '/s')} | {goodputs} | {over} "
            f"| {own.ttft_p50:.0f} / {own.ttft_p90:.0f} | {own.tpot_p50:.1f} "
            f"| {own.itl_p99:.1f} | {counts} |"
        )
    return "\n".join(lines)
