"""Choice of the executor by ``tensor_parallel_size`` and ``distributed_executor_backend``."""

from __future__ import annotations

from tandem.engine.config import EngineConfig
from tandem.engine.executor.base import Executor
from tandem.protocol.errors import InvalidParameter


def make_executor(config: EngineConfig, *, reach_memory: bool = False) -> Executor:
    """Return the configured executor, not started. ``reach_memory``: a hand-off requires one
    region of memory. Raises InvalidParameter if it is not available."""
    parallel = config.parallel
    if parallel.in_children:
        from tandem.engine.executor.multiproc import MultiprocExecutor, unreachable

        if reach_memory and parallel.tensor_parallel_size > 1:
            allowed = "1 for a worker with a hand-off, which moves one rank's KV"
            raise InvalidParameter("tensor_parallel_size", parallel.tensor_parallel_size, allowed)
        if reach_memory and config.device == "cuda":
            raise unreachable()
        return MultiprocExecutor()
    from tandem.engine.executor.uniproc import UniProcExecutor

    return UniProcExecutor()
