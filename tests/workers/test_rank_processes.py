"""Ranks in processes of their own are among the worker's series."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from tests.engine_run.cpu_engine import CPUEngine
from tests.waiting import wait_for

from tandem.engine.executor.multiproc import MultiprocExecutor
from tandem.engine.executor.uniproc import UniProcExecutor
from tandem.worker.rank_processes import show_rank_processes

MEMORY = "tandem:rank_process_resident_memory_bytes"
CPU = "tandem:rank_process_cpu_seconds_total"


def read(registry: CollectorRegistry, name: str) -> float | None:
    """One series of rank 0."""
    return registry.get_sample_value(name, {"rank": "0"})


def test_a_ranks_process_is_shown_until_it_is_gone(smollm2: Path) -> None:
    """Its memory is that of weights, and steps take its time; an engine that stopped has none."""
    registry = CollectorRegistry()
    engine = CPUEngine(smollm2, executor=MultiprocExecutor(), max_model_len=256)
    show_rank_processes(registry, engine.executor.processes)
    try:
        memory, before = read(registry, MEMORY), read(registry, CPU)
        assert memory is not None
        assert memory > 200 << 20
        assert before is not None
        engine.generate([list(range(40, 90))], 16)
        wait_for(lambda: (read(registry, CPU) or 0.0) > before)
    finally:
        engine.executor.stop()
    assert read(registry, MEMORY) is None


def test_a_process_that_died_leaves_no_series_and_no_error() -> None:
    """Between two scrapes."""
    registry = CollectorRegistry()
    command = [sys.executable, "-c", "input(print(flush=True))"]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    show_rank_processes(registry, lambda: {0: child.pid})
    assert child.stdout is not None
    assert child.stdout.readline() == b"\n"  # the kernel says 0 of one that has only begun
    assert read(registry, MEMORY)
    child.communicate(b"\n")
    assert read(registry, MEMORY) is None
    assert MEMORY.encode() in generate_latest(registry)


def test_a_rank_of_the_same_process_is_not_counted_twice() -> None:
    """It is in the process's own series."""
    assert UniProcExecutor().processes() == {}
    registry = CollectorRegistry()
    show_rank_processes(registry, lambda: {3: os.getpid()})
    assert registry.get_sample_value(MEMORY, {"rank": "3"})
