"""The seam between plan and run: whoever carries a plan to the ranks and brings tokens back."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Protocol

from tandem.engine.config import EngineConfig
from tandem.engine.kv_memory import Capacity, KVRegion, SlabAllocator
from tandem.engine.step import ModelRunnerOutput, SchedulerOutput, TokenMasks


class Executor(Protocol):
    """Carries plans to the ranks: ``UniProcExecutor`` has one, in the same process,
    ``MultiprocExecutor`` one in a child."""

    def start(self, config: EngineConfig, allocate: SlabAllocator | None = None) -> Capacity:
        """Load weights and the slab. Called once; raises what went wrong in plain words."""
        ...

    def execute(self, plan: SchedulerOutput) -> Future[ModelRunnerOutput]:
        """Launch one step. Two may be in flight; they finish in order. One that awaits masks is
        computed, and draws nothing before ``draw``."""
        ...

    def draw(self, masks: TokenMasks) -> None:
        """Have the step launched last, which awaits these masks, draw its tokens. What that raises
        is in the step's future."""
        ...

    def regions(self) -> tuple[KVRegion, ...]:
        """KV memory of each rank, by rank, for those who move blocks past the engine. After
        ``start``. Raises InvalidParameter where this process cannot reach it."""
        ...

    def check_health(self) -> None:
        """Raise unless every rank is there. Never blocks; asked when nothing runs."""
        ...

    def stop(self) -> None:
        """End the ranks. May be called twice."""
        ...
