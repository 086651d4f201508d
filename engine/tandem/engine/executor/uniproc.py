"""Executor of one rank in this process: for CPU workers, offline engines and tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

from tandem.engine.config import EngineConfig
from tandem.engine.kv_memory import Capacity, KVCacheAllocator, KVRegion
from tandem.engine.step import ModelRunnerOutput, SchedulerOutput, TokenMasks
from tandem.engine.threads import spin_briefly
from tandem.protocol.commands import SleepTag
from tandem.protocol.kv import Fence

if TYPE_CHECKING:
    from tandem.engine.worker import LaunchedStep, Worker


class StepFuture(Future[ModelRunnerOutput]):
    """Result of a step, read from the device in the thread that calls ``result``."""

    def __init__(self, launched: LaunchedStep) -> None:
        super().__init__()
        self._launched = launched

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        """Wait for the result; without a timeout the step has its own deadline."""
        if not self.done():
            wait = self._launched.result
            self.set_result(wait() if timeout is None else wait(timeout))
        return super().result()

    def wait_nearly(self, seconds: float) -> Fence:
        return self._launched.wait_nearly(seconds)


class UniProcExecutor:
    """Executor of one rank in the caller's thread."""

    def __init__(self) -> None:
        self._worker: Worker | None = None
        self._open: StepFuture | None = None
        """The step that awaits its masks."""

    def start(self, config: EngineConfig, allocate: KVCacheAllocator | None = None) -> Capacity:
        """Start the rank; torch is imported only here."""
        spin_briefly()
        from tandem.engine.worker import Worker

        assert self._worker is None, "the executor has started already"
        worker = Worker(config)
        capacity = worker.start(allocate)
        self._worker = worker
        return capacity

    def execute(self, plan: SchedulerOutput) -> Future[ModelRunnerOutput]:
        """Launch the step; its future waits for the result, and has errors of the launch."""
        worker = self.worker
        try:
            launched = StepFuture(worker.launch(plan))
        except Exception as error:
            future: Future[ModelRunnerOutput] = Future()
            future.set_exception(error)
            return future
        if plan.awaits_masks:
            self._open = launched
        return launched

    def draw(self, masks: TokenMasks) -> None:
        launched, self._open = self._open, None
        if launched is None:
            return  # the launch failed, which its future reports
        try:
            self.worker.draw(masks)
        except Exception as error:
            launched.set_exception(error)

    def regions(self) -> tuple[KVRegion, ...]:
        return (KVRegion(0, self.worker.kv_cache_blocks()),)

    def sleep(self, level: int) -> int:
        return self.worker.rest.sleep(level)

    def wake_up(self, tags: Sequence[SleepTag]) -> None:
        self.worker.rest.wake_up(tags)

    def profile(self, folder: str | None) -> str:
        return self.worker.recorded(folder)

    def processes(self) -> Mapping[int, int]:
        return {}

    def check_health(self) -> None:
        """See Executor. A rank of this process is as well as the process."""

    def stop(self) -> None:
        if self._worker is not None:
            self._worker.stop()
            self._worker = None

    @property
    def worker(self) -> Worker:
        assert self._worker is not None, "the executor has not started, or has stopped"
        return self._worker
