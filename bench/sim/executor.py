"""An executor without a device: a step's result is there when its time has passed."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Protocol

from bench.sim.times import Device, StepTimes

from tandem.engine.config import EngineConfig
from tandem.engine.kv_memory import Capacity, KVCacheAllocator, KVRegion, StepSize
from tandem.engine.step import FenceDone, ModelRunnerOutput, Sampled, SchedulerOutput, TokenMasks
from tandem.engine.timing import Padding
from tandem.engine.worker.gpu import MOST_CAPTURED
from tandem.engine.worker.graphs import StepGraphs, step_shapes
from tandem.protocol.commands import SleepTag

FIRST_ID, IDS = 1000, 1000


class HasNow(Protocol):
    """A clock of one's own, that may be ahead of the run's: who waits for a step has aged."""

    now: float


class _Result(Future[ModelRunnerOutput]):
    """Result of a step; reading it waits until ``due``."""

    def __init__(self, output: ModelRunnerOutput, due: float, waiter: HasNow) -> None:
        super().__init__()
        self._output, self._due, self._waiter = output, due, waiter

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        """Return the result at once, and move the reader's clock."""
        self._waiter.now = max(self._waiter.now, self._due)
        return self._output


def step_sizes(config: EngineConfig) -> tuple[StepSize, ...]:
    """Return the sizes of graphs that an engine with ``config`` captures on a GPU."""
    graphs = StepGraphs()
    tokens, rows = config.scheduler.max_num_batched_tokens, config.scheduler.max_num_seqs
    graphs.offer(step_shapes(max_rows=rows, max_tokens=tokens, max_captured=MOST_CAPTURED))
    return graphs.sizes


class SimExecutor:
    """Implements ``Executor`` for one worker; steps run one after the other."""

    def __init__(self, device: Device, worker: HasNow, seed: int) -> None:
        self._device, self._worker = device, worker
        self._draw = random.Random(seed)
        self._free_at = 0.0
        self.busy = 0.0
        """Seconds of all steps."""

    def start(self, config: EngineConfig, allocate: KVCacheAllocator | None = None) -> Capacity:
        """No weights and no slab, but blocks that are counted, and steps padded as a GPU's are."""
        sizes = step_sizes(config)
        self._times = StepTimes(config.facts, self._device, Padding(sizes))
        return Capacity(self._device.num_blocks, config.layout, step_sizes=sizes)

    def execute(self, plan: SchedulerOutput) -> Future[ModelRunnerOutput]:
        """A step behind those before it. Tokens are drawn by their position alone."""
        seconds = self._times.of(plan.rows)
        seconds *= max(0.5, self._draw.gauss(1.0, self._device.jitter))
        self.busy += seconds
        self._free_at = max(self._free_at, self._worker.now) + seconds
        sampled = []
        for row in plan.rows:
            if row.sample_choices:
                token = (FIRST_ID + (row.num_computed + row.num_scheduled_tokens) % IDS,)
                drawn = tuple(token for _ in row.sample_choices)
                sampled.append(Sampled(row.seq, row.sample_choices, drawn))
        output = ModelRunnerOutput(plan.step, tuple(sampled), FenceDone())
        return _Result(output, self._free_at, self._worker)

    def draw(self, masks: TokenMasks) -> None:
        """Nobody asks for structured output here."""
        raise AssertionError("a simulation asks for no structured output")

    def regions(self) -> tuple[KVRegion, ...]:
        """No memory."""
        return ()

    def sleep(self, level: int) -> int:
        """Nobody puts a simulation to sleep."""
        raise AssertionError("a simulation does not sleep")

    def wake_up(self, tags: Sequence[SleepTag]) -> None:
        """See ``sleep``."""
        raise AssertionError("a simulation does not sleep")

    def profile(self, folder: str | None) -> str:
        """Nothing is computed that could be recorded."""
        raise AssertionError("a simulation computes nothing")

    def processes(self) -> Mapping[int, int]:
        """None."""
        return {}

    def check_health(self) -> None:
        """Always well."""

    def stop(self) -> None:
        """Nothing runs."""
