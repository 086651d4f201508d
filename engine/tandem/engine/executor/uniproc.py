"""The executor of one rank in this very process: a step is a call.

What a CPU worker and an offline engine use, and every test that wants a real model.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from tandem.engine.config import EngineConfig
from tandem.engine.executor.base import Capacity, SlabAllocator
from tandem.engine.executor.threads import spin_briefly
from tandem.engine.scheduler.output import ModelRunnerOutput, SchedulerOutput

if TYPE_CHECKING:
    from tandem.engine.worker import Worker


class UniProcExecutor:
    """Runs the one rank where it is called. Implements Executor."""

    def __init__(self) -> None:
        self._worker: Worker | None = None

    def start(self, config: EngineConfig, allocate: SlabAllocator | None = None) -> Capacity:
        """See Executor. torch is imported here, not before."""
        spin_briefly()
        from tandem.engine.worker import Worker

        assert self._worker is None, "the executor has started already"
        worker = Worker(config)
        capacity = worker.start(allocate)
        self._worker = worker
        return capacity

    def execute(self, plan: SchedulerOutput) -> Future[ModelRunnerOutput]:
        """The step's result, done when this returns; what the step raised is in the future."""
        worker = self.worker
        future: Future[ModelRunnerOutput] = Future()
        try:
            future.set_result(worker.execute(plan))
        except Exception as error:
            future.set_exception(error)
        return future

    def collective(self, method: str, *args: object) -> list[Any]:
        """See Executor."""
        call: Callable[..., Any] = getattr(self.worker, method)
        return [call(*args)]

    def stop(self) -> None:
        """See Executor."""
        if self._worker is not None:
            self._worker.stop()
            self._worker = None

    @property
    def worker(self) -> Worker:
        """The rank, once started."""
        assert self._worker is not None, "the executor has not started, or has stopped"
        return self._worker
