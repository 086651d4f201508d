"""Resource metrics of ranks in processes of their own, among a worker's series.

They are in the worker's series because a pod has one port. Read from the kernel's /proc at each
scrape. A rank in the worker's own process is in the usual ``process_*`` series and has none here.
Without /proc there are no series.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_UTIME, _STIME, _RSS = 11, 12, 21
"""Indices of fields of /proc/PID/stat after the command's name, from 0: proc(5)."""

Pids = Callable[[], Mapping[int, int]]
"""Process ids by rank."""


def show_rank_processes(registry: CollectorRegistry, pids: Pids) -> None:
    """Add the series of all ranks that have a process of their own."""
    registry.register(
        RankSeries(
            "tandem:rank_process_resident_memory_bytes",
            "Memory of a rank's own process.",
            "gauge",
            pids,
            lambda fields: float(fields[_RSS]) * os.sysconf("SC_PAGE_SIZE"),
        )
    )
    registry.register(
        RankSeries(
            "tandem:rank_process_cpu_seconds",
            "CPU time that a rank's own process has taken.",
            "counter",
            pids,
            _cpu_seconds,
        )
    )


class RankSeries(Collector):
    """Series of one figure of each such process."""

    labels = ("rank",)

    def __init__(
        self, name: str, text: str, kind: str, pids: Pids, read: Callable[[list[str]], float]
    ) -> None:
        """``read`` takes the fields of a process's stat, ``kind`` is gauge or counter."""
        self.name = name
        self.documentation = text
        self.kind = kind
        self._pids = pids
        self._read = read

    def collect(self) -> Iterable[Metric]:
        """See Collector; a process that is gone has no series."""
        made = CounterMetricFamily if self.kind == "counter" else GaugeMetricFamily
        family = made(self.name, self.documentation, labels=self.labels)
        for rank, pid in sorted(self._pids().items()):
            fields = _stat(pid)
            if fields is not None:
                family.add_metric((str(rank),), self._read(fields))
        yield family


def _cpu_seconds(fields: list[str]) -> float:
    ticks = float(fields[_UTIME]) + float(fields[_STIME])
    return ticks / os.sysconf("SC_CLK_TCK")


def _stat(pid: int) -> list[str] | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return text.rpartition(")")[2].split()
