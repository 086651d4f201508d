"""Ranks in processes of their own are among the worker's series."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from tests.engine_run.cpu_engine import CPUEngine
from tests.engine_run.forked_rank import ForkedExecutor
from tests.waiting import wait_for

from tandem.engine.executor.uniproc import UniProcExecutor
from tandem.worker.launch import show_rank_processes

pytestmark = pytest.mark.full

MEMORY = "tandem:rank_process_resident_memory_bytes"
CPU = "tandem:rank_process_cpu_seconds_total"


def read(registry: CollectorRegistry, name: str) -> float | None:
    return registry.get_sample_value(name, {"rank": "0"})


def test_a_ranks_process_is_shown_until_it_is_gone(small: Path) -> None:
    """Its memory is that of the process, and steps take its time; one that stopped has none."""
    registry = CollectorRegistry()
    engine = CPUEngine(small, executor=ForkedExecutor(), max_model_len=256)
    show_rank_processes(registry, engine.executor.processes)
    try:
        memory, before = read(registry, MEMORY), read(registry, CPU)
        assert memory is not None
        (pid,) = engine.executor.processes().values()
        assert memory == pytest.approx(psutil.Process(pid).memory_info().rss, rel=0.2)
        assert before is not None

        def grew() -> bool:
            engine.generate([list(range(40, 90))], 16)
            return (read(registry, CPU) or 0.0) > before

        wait_for(grew)
    finally:
        engine.executor.stop()
    assert read(registry, MEMORY) is None


def test_a_process_that_died_leaves_no_series_and_no_error() -> None:
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
