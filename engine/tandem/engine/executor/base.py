"""The seam between plan and run: whoever carries a plan to the ranks and brings tokens back."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from tandem.engine.config import EngineConfig
from tandem.engine.step import ModelRunnerOutput, SchedulerOutput
from tandem.protocol.layout import KVLayout

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the ranks can hold, known after the weights are loaded."""

    num_blocks: int
    layout: KVLayout
    num_cpu_blocks: int = 0
    """Blocks in host memory behind them, where blocks are offloaded."""


@dataclass(frozen=True, slots=True)
class KVRegion:
    """One rank's KV memory, as this process reaches it."""

    rank: int
    blocks: Tensor
    """uint8 [num_blocks, block_bytes], dense, on the rank's device."""


SlabAllocator = Callable[[int], Any]
"""Bytes to a writable flat uint8 tensor of that many bytes; owns the memory. Injected by roles
that register the slab with a transport; the engine alone uses ``torch.empty``."""


class Executor(Protocol):
    """Carries plans to the ranks: ``UniProcExecutor`` has one, in the same process,
    ``MultiprocExecutor`` one in a child."""

    def start(self, config: EngineConfig, allocate: SlabAllocator | None = None) -> Capacity:
        """Load weights and the slab. Called once; raises what went wrong in plain words."""
        ...

    def execute(self, plan: SchedulerOutput) -> Future[ModelRunnerOutput]:
        """Launch one step. Two may be in flight; they finish in order."""
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
