"""A worker whose device is a clock: steps take the time of an H200, tokens are drawn at random.

So everything around the model (I/O thread, step loop, router, client) runs as it does on a GPU,
on any machine, and can be profiled: ``python bench/http/paced.py FOLDER PORT [--profile FILE]``.
FOLDER is one of model.py's. ``--scale`` makes the device slower where the host is.
"""

from __future__ import annotations

import argparse
import cProfile
import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from tandem.engine.config import EngineConfig
from tandem.engine.kv_memory import Capacity, KVRegion, SlabAllocator
from tandem.engine.step import FenceDone, ModelRunnerOutput, Sampled, SchedulerOutput, TokenMasks
from tandem.protocol.card import WorkerRole
from tandem.protocol.commands import SleepTag
from tandem.protocol.errors import InvalidParameter
from tandem.worker.handoff import NoHandoff
from tandem.worker.launch import RoleContext, RoleParts, run_worker
from tandem.worker.server_config import ServerConfig

FLOOR, ROW, PROMPT_TOKEN = 4.1e-3, 5.2e-5, 2.4e-5
"""Seconds: of any step, more for each row that decodes, more for each prompt token."""


class PacedFuture(Future[ModelRunnerOutput]):
    """Done when the device would be."""

    def __init__(self, output: ModelRunnerOutput, due: float) -> None:
        super().__init__()
        self._output, self._due = output, due

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        """Wait as the engine waits for a device: short sleeps."""
        while time.perf_counter() < self._due:
            time.sleep(2e-5)
        return self._output


class PacedExecutor:
    """Implements Executor."""

    def __init__(self, num_blocks: int, scale: float) -> None:
        self._num_blocks, self._scale = num_blocks, scale
        self._free_at = 0.0
        self._token = 0

    def start(self, config: EngineConfig, allocate: SlabAllocator | None = None) -> Capacity:
        """No weights, no slab."""
        self._vocabulary = config.facts.vocab_size
        return Capacity(self._num_blocks, config.layout)

    def execute(self, plan: SchedulerOutput) -> Future[ModelRunnerOutput]:
        """A step after those before it."""
        prompts = sum(row.num_tokens for row in plan.rows if row.num_tokens > 1)
        decodes = sum(row.num_tokens == 1 for row in plan.rows)
        seconds = max(FLOOR + decodes * ROW, prompts * PROMPT_TOKEN + decodes * ROW)
        self._free_at = max(self._free_at, time.perf_counter()) + seconds * self._scale
        sampled = tuple(
            Sampled(row.seq, row.sample_choices, tuple((self._draw(),) for _ in row.sample_choices))
            for row in plan.rows
            if row.sample_choices
        )
        return PacedFuture(ModelRunnerOutput(plan.step, sampled, FenceDone(), {}), self._free_at)

    def draw(self, masks: TokenMasks) -> None:
        """Nothing here is under a grammar."""
        raise AssertionError("the benchmark asks for no structured output")

    def _draw(self) -> int:
        self._token = (self._token * 1103515245 + 12345) % (1 << 31)
        return 300 + self._token % (self._vocabulary - 300)

    def regions(self) -> tuple[KVRegion, ...]:
        """No memory."""
        return ()

    def sleep(self, level: int) -> int:
        """No memory."""
        return 0

    def wake_up(self, tags: Sequence[SleepTag]) -> None:
        """No memory."""

    def profile(self, folder: str | None) -> str:
        """Nothing is computed that could be recorded."""
        raise InvalidParameter("torch_profiler_dir", folder, "an engine that runs a model")

    def processes(self) -> Mapping[int, int]:
        """None."""
        return {}

    def check_health(self) -> None:
        """Always well."""

    def stop(self) -> None:
        """Nothing runs."""


def main() -> None:
    """Serve until a signal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("port", type=int)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--profile")
    args = parser.parse_args()
    logging.basicConfig(level="WARNING")
    config = EngineConfig.of(
        args.folder,
        device="cpu",
        block_size=64,
        max_num_batched_tokens=8192,
        async_scheduling=True,
        revision="paced",
    )
    server = ServerConfig(host="127.0.0.1", port=args.port, probe_port=0, drain_seconds=1.0)

    def make_role(_: RoleContext) -> RoleParts:
        return RoleParts(NoHandoff(), None)

    profile = cProfile.Profile()
    if args.profile:
        profile.enable()
    executor: Any = PacedExecutor(12_000, args.scale)
    run_worker(config, server, WorkerRole.DECODE, executor=executor, make_role=make_role)
    if args.profile:
        profile.dump_stats(args.profile)


if __name__ == "__main__":
    main()
