"""Choice of the executor by ``distributed_executor_backend``."""

from __future__ import annotations

from tandem.engine.config import EngineConfig
from tandem.engine.executor.base import Executor


def make_executor(config: EngineConfig, *, reach_memory: bool = False) -> Executor:
    """Return the configured executor, not started. ``reach_memory``: its ``regions`` are required.
    Raises InvalidParameter if they are not available."""
    if config.parallel.distributed_executor_backend == "mp":
        from tandem.engine.executor.multiproc import MultiprocExecutor, unreachable

        if reach_memory and config.device == "cuda":
            raise unreachable()
        return MultiprocExecutor()
    from tandem.engine.executor.uniproc import UniProcExecutor

    return UniProcExecutor()
