"""Times of calls, and rates of a device's memory and matrix units.

On a GPU a graph of the calls is replayed, so that launches from the host do not count.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.kernels.attention import PagedBatch


@dataclass(frozen=True, slots=True)
class Shape:
    """Heads and pages of a model; the default is Qwen3-8B."""

    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page: int = 64
    dtype: torch.dtype = torch.bfloat16

    @property
    def key_bytes(self) -> int:
        return 2 * self.kv_heads * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Case:
    """A batch with its KV cache; q has one entry per layer, so that repeated launches find cold
    pages."""

    q: Tensor
    kv_cache: Tensor
    batch: PagedBatch

    def layer(self, index: int) -> Tensor:
        """Return one layer's view of the KV cache: [blocks, K|V, kv_heads, page, head_dim]."""
        return self.kv_cache[:, index]


def make_case(
    shape: Shape, lengths: list[int], queries: list[int], layers: int, device: str = "cuda"
) -> Case:
    """Return random pages in random places, NaN after every sequence's last token, and random
    queries."""
    counts = [-(-max(n, 1) // shape.page) for n in lengths]
    size = (sum(counts), layers, 2, shape.kv_heads, shape.page, shape.head_dim)
    kv_cache = torch.empty(size, dtype=shape.dtype, device=device)
    for block in torch.split(kv_cache, max(1, (1 << 28) // kv_cache[0].numel())):
        block.normal_()
    order = torch.randperm(sum(counts))
    tables = torch.full((len(lengths), max(counts)), 2**30, dtype=torch.int32)
    first = 0
    for s, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        tables[s, :count] = order[first : first + count]
        kv_cache[order[first + count - 1], :, :, :, length - (count - 1) * shape.page :] = torch.nan
        first += count
    starts = torch.tensor([0, *queries]).cumsum(0).to(torch.int32)
    q = torch.randn(
        layers, sum(queries), shape.heads, shape.head_dim, dtype=shape.dtype, device=device
    )
    batch = PagedBatch(
        starts.to(device),
        torch.tensor(lengths, dtype=torch.int32).to(device),
        tables.to(device),
        max(queries),
        max(lengths),
    )
    return Case(q, kv_cache, batch)


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


def replay_us(run: Callable[[], object], calls: int) -> float:
    """Return the median µs of one call, in replays of a CUDA graph that holds `calls` of them.

    25 ms of warm-up, then 100 ms (at least 5 replays).
    """
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    torch.cuda.synchronize()
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
