"""Times of calls, and rates of a device's memory and matrix units.

On a GPU a graph of the calls is replayed, so that launches from the host do not count.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch

L2_BYTES = 60 << 20


class Rates(NamedTuple):
    """Rates that a device reaches with one plain op each."""

    bytes_per_us: float
    """Bytes read per µs: a sum over memory that no cache holds."""
    operations_per_us: float
    """Operations per µs of a square product; a multiplication and an addition are two."""


def call_us(run: Callable[[], object], calls: int, device: torch.device) -> float:
    """Return the median µs of one of the ``calls`` calls that ``run`` makes on ``device``."""
    if device.type == "cuda":
        return replay_us(run, calls)
    run()
    times: list[float] = []
    while len(times) < 3 or (sum(times) < 0.1 and len(times) < 50):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return sorted(times)[len(times) // 2] * 1e6 / calls


def replay_us(run: Callable[[], object], calls: int, rest_s: float = 0.0) -> float:
    """Return the median µs of one call, in replays of a CUDA graph that holds `calls` of them.

    25 ms of warm-up, then 100 ms (at least 5 replays), after a rest, as earlier work would lower
    the clock.
    """
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    torch.cuda.synchronize()
    time.sleep(rest_s)
    times: list[float] = []
    while sum(times) < 125e3 or len(times) < 7:
        start, stop = _event(), _event()
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) * 1e3)
    warm = 0.0
    while warm < 25e3 and len(times) > 5:
        warm += times.pop(0)
    return sorted(times)[len(times) // 2] / calls


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def rates(device: torch.device, dtype: torch.dtype, *, small: bool = False) -> Rates:
    """Measure the rates; ``small`` takes sizes that a CPU computes quickly."""
    numbers, side = (1 << 24, 512) if small else (1 << 31, 8192)
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    multiplied = 2 * side**3 / call_us(lambda: a @ b, 1, device)
    memory = torch.ones(numbers, dtype=torch.float32, device=device)
    return Rates(numbers * 4 / call_us(memory.sum, 1, device), multiplied)
