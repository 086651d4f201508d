"""The interface between plan and run: an executor sends a plan to the ranks and returns tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Protocol, runtime_checkable

from tandem.engine.config import EngineConfig
from tandem.engine.kv_memory import Capacity, KVCacheAllocator, KVRegion
from tandem.engine.step import ModelRunnerOutput, SchedulerOutput, TokenMasks
from tandem.protocol.commands import SleepTag
from tandem.protocol.kv import Fence


@runtime_checkable
class OnKVWritten(Protocol):
    """Additional interface of a step's future if its KV is known to be written before its result:
    the head and the draws are still to come then."""

    def wait_nearly(self, seconds: float) -> Fence:
        """Return the fence of the step's KV once all is written, or nearly. Raises TimeoutError."""
        ...


class Executor(Protocol):
    """Carries plans to the ranks: ``UniProcExecutor`` has one, in the same process,
    ``MultiprocExecutor`` one in a child."""

    def start(self, config: EngineConfig, allocate: KVCacheAllocator | None = None) -> Capacity:
        """Load weights and the KV cache. Called once; errors are raised with a plain message."""
        ...

    def execute(self, plan: SchedulerOutput) -> Future[ModelRunnerOutput]:
        """Launch one step. Two may be in flight; they finish in order. One that awaits masks is
        computed, and draws nothing before ``draw``. The future may be ``OnKVWritten``."""
        ...

    def draw(self, masks: TokenMasks) -> None:
        """Draw the tokens of the step launched last, under its masks. Errors are in its future."""
        ...

    def regions(self) -> tuple[KVRegion, ...]:
        """Return the KV memory of each rank, by rank, for code that moves blocks outside the
        engine. Call after ``start``. Raises InvalidParameter if this process cannot reach it."""
        ...

    def sleep(self, level: int) -> int:
        """Give back KV memory and, depending on ``level``, weights; return the number of bytes.
        Parts that sleep already, at the same level, stay asleep. Called when no step is in flight;
        no step follows before ``wake_up`` has taken all of it again. Raises TandemError if the
        memory cannot be given back; then nothing was."""
        ...

    def wake_up(self, tags: Sequence[SleepTag]) -> None:
        """Take again the parts in ``tags``; KV memory has lost its content. Raises the error; parts
        that were not taken still sleep."""
        ...

    def profile(self, folder: str | None) -> str:
        """Begin to record steps for a file in ``folder``, or for None end that and write it while
        steps go on; return the file. Raises TandemError: a recording runs, none does, or it cannot
        be written."""
        ...

    def processes(self) -> Mapping[int, int]:
        """Return the process ids of ranks that run in processes of their own, by rank."""
        ...

    def check_health(self) -> None:
        """Raise unless every rank is alive. Never blocks; called when nothing runs."""
        ...

    def stop(self) -> None:
        """End the ranks. May be called twice."""
        ...
