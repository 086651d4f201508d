"""Placement by cost against a strict pair and two bounded workers, over seeds of each load."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.sim.figures import figures
from bench.sim.named_loads import UNITS, load_of
from bench.sim.stack import SHAPES, Stack

STRICT, BOUNDED, PAIR = "1P1D strict", "two aggregated bounded", "1P1D"
LOADS = "mixed:10,mixed:14,agents:16,agents:24,uniform:14,uniform:18,trace:30"
HEAD = (
    "| load | rate | strict pair | two bounded | pair | over two bounded: mean, least, most "
    "| over the better | late first tokens / gaps | pair / decode / prefill |"
)
WAYS = ("pair", "decode", "prefill")


@dataclass(slots=True)
class Row:
    """One load; goodput in requests a second by seed, in the order of seeds."""

    name: str
    rate: float
    goodput: dict[str, list[float]] = field(default_factory=dict)
    """By shape."""
    late: list[tuple[float, float]] = field(default_factory=list)
    """Shares of requests whose first token, and whose gaps, were late."""
    ways: Counter[str] = field(default_factory=Counter)
    """Attempts, of all seeds."""

    def mean(self, shape: str) -> float:
        """Over seeds."""
        return sum(self.goodput[shape]) / len(self.goodput[shape])


def over_seeds(
    loads: Sequence[tuple[str, float]],
    seeds: Sequence[int],
    seconds: float,
    path: Path | None,
) -> list[Row]:
    """Every shape under every load with every seed; each is said on standard error."""
    rows = []
    for name, rate in loads:
        row = Row(name, rate)
        for shape in (STRICT, BOUNDED, PAIR):
            found = row.goodput.setdefault(shape, [])
            for seed in seeds:
                stack = Stack(SHAPES[shape], seed=seed)
                seen = figures(load_of(name, seconds, seed, path)(rate)(stack))
                found.append(seen.goodput)
                if shape == PAIR:
                    row.late.append((seen.late_first, seen.late_gaps))
                    row.ways.update(stack.router.ways)
            shown = " ".join(f"{each:.2f}" for each in found)
            print(name, rate, shape, shown, file=sys.stderr, flush=True)
        rows.append(row)
    return rows


def table(rows: Sequence[Row]) -> str:
    """Return a table in Markdown."""
    lines = [HEAD, "|---" * 9 + "|"]
    for row in rows:
        strict, bounded, own = (row.mean(each) for each in (STRICT, BOUNDED, PAIR))
        pairs = zip(row.goodput[PAIR], row.goodput[BOUNDED], strict=True)
        apart = sorted(100 * (mine / theirs - 1) for mine, theirs in pairs if theirs)
        over = f"{100 * (own / bounded - 1):+.0f} %, {apart[0]:+.0f}, {apart[-1]:+.0f}"
        late = [sum(each[at] for each in row.late) / len(row.late) for at in (0, 1)]
        best = max(strict, bounded)
        ways = " / ".join(str(row.ways[way]) for way in WAYS)
        lines.append(
            f"| {row.name} | {row.rate:g} {UNITS.get(row.name, '/s')} | {strict:.2f} "
            f"| {bounded:.2f} | {own:.2f} | {over} | {100 * (own / best - 1):+.0f} % "
            f"| {late[0]:.3f} / {late[1]:.3f} | {ways} |"
        )
    return "\n".join(lines)
