"""Interface between plan and run: an executor sends a plan to the ranks and returns tokens."""

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
    """Future of a step whose KV is written before its tokens are drawn."""

    def wait_nearly(self, seconds: float) -> Fence:
        """Return the fence of the step's KV once all is written, or nearly. Raises TimeoutError."""
        ...


class Executor(Protocol):
    """Executor of plans: ``UniProcExecutor`` in this process, ``MultiprocExecutor`` in children."""

    def start(self, config: EngineConfig, allocate: KVCacheAllocator | None = None) -> Capacity:
        """Load weights and the KV cache. Call once; errors have a plain message."""
        ...

    def execute(self, plan: SchedulerOutput) -> Future[ModelRunnerOutput]:
        """Launch one step; at most two are in flight, in order. A step that awaits masks draws
        nothing before ``draw``. The future may be ``OnKVWritten``."""
        ...

    def draw(self, masks: TokenMasks) -> None:
        """Draw the tokens of the step launched last, under its masks. Errors are in its future."""
        ...

    def regions(self) -> tuple[KVRegion, ...]:
        """Return each rank's KV memory, after ``start``. Raises InvalidParameter if this process
        cannot reach it."""
        ...

    def sleep(self, level: int) -> int:
        """Free KV memory and, depending on ``level``, weights; return the bytes. No step may be in
        flight, or follow before ``wake_up`` of all parts. Raises TandemError if nothing could be
        freed."""
        ...

    def wake_up(self, tags: Sequence[SleepTag]) -> None:
        """Allocate the parts in ``tags`` again; KV memory has lost its content. After an error, the
        other parts still sleep."""
        ...

    def profile(self, folder: str | None) -> str:
        """Begin to record steps for a file in ``folder``, or end that if None; return the file.
        Raises TandemError if a recording runs, none does, or writing fails."""
        ...

    def processes(self) -> Mapping[int, int]:
        """Return the process ids of ranks in other processes, by rank."""
        ...

    def check_health(self) -> None:
        """Raise unless every rank is alive. Never blocks; called when nothing runs."""
        ...

    def stop(self) -> None:
        """End the ranks. May be called twice."""
        ...
