"""The loads of a simulated run, by name and rate."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from bench.sim.agents import Agents, agents
from bench.sim.loads import Load, mixed, trace, uniform

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
    """Return the load as a function of its rate. Raises ValueError for a trace without a file."""
    if name == "agents":
        return lambda rate: agents(Agents(round(rate), seconds=seconds), seed)
    if name == "trace":
        if path is None:
            raise ValueError("--trace: None, must be a CSV file, as the load is a trace")
        return lambda rate: trace(path, rate, max(1, round(rate * seconds)), seed)
    made = {"uniform": uniform, "mixed": mixed}[name]
    return lambda rate: made(rate, max(1, round(rate * seconds)), seed)
