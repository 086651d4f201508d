"""Memory that a rank frees while its engine sleeps, and its return.

KV memory keeps its addresses, which transports and graphs know: only its content is freed. Weights
are moved to host memory at level 1 (a CPU's are there already). At level 2 they are dropped, and
loaded again from the prepared folder. A GPU's graphs are dropped with either, and captured again.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Sequence

import torch

from tandem.engine.config import EngineConfig
from tandem.engine.kv_memory import SlabAllocator
from tandem.engine.loader import open_weights
from tandem.engine.models import load_model
from tandem.engine.worker import gpu
from tandem.engine.worker.choices import ChoiceGraphs
from tandem.engine.worker.graphs import StepGraphs
from tandem.engine.worker.host_memory import available
from tandem.engine.worker.offload import HostBlocks
from tandem.engine.worker.parked import ParkedWeights, ParkingRoom, weight_bytes
from tandem.engine.worker.runner import ModelRunner
from tandem.kernels.memory import pages
from tandem.kernels.memory.device import MappedAllocator
from tandem.kernels.memory.page_locked import registrar_for
from tandem.protocol.commands import SleepTag
from tandem.protocol.errors import InvalidParameter, TandemError

logger = logging.getLogger(__name__)


class Rest:
    """Memory of a rank, awake or asleep; called between steps."""

    def __init__(
        self, config: EngineConfig, runner: ModelRunner, allocate: SlabAllocator | None
    ) -> None:
        """``runner`` has started; ``allocate`` allocated its slab, None: torch did."""
        self._config = config
        self._runner = runner
        self._allocate = allocate
        self._device = torch.device(config.device)
        self._host_blocks = 0
        """Blocks of an offload tier, while it has no memory."""
        self._room = ParkingRoom(registrar_for(self._device))
        self._parked: ParkedWeights | None = None
        self._asleep: set[SleepTag] = set()
        self._dropped = False
        """True if weights are to be loaded again."""

    def sleep(self, level: int) -> int:
        """Sleep as in Executor. Also raises InvalidParameter if torch allocated a GPU's slab."""
        awake = set(SleepTag) - self._asleep
        started = time.monotonic()
        if self._on_gpu and not isinstance(self._allocate, MappedAllocator):
            allowed = "none: this driver has no mapped memory for the KV cache to give back"
            raise InvalidParameter("level", level, allowed)
        runner = self._runner
        if self._on_gpu:
            torch.cuda.synchronize(self._device)
            runner.graphs, runner.choices = StepGraphs(), ChoiceGraphs()
            runner.batch.sampling.bounds = None
        try:
            given = self._park(level, awake)
        except (TandemError, RuntimeError):
            if self._on_gpu and not self._asleep:
                gpu.capture(self._config, runner)
            raise
        if runner.host is not None:
            self._host_blocks = len(runner.host.blocks)
            given += runner.host.close()
            runner.host = None
        if level > 1 and SleepTag.WEIGHTS in awake:
            self._room.free()
            given += weight_bytes(runner.model, self._device)
            del runner.model
            self._dropped = True
        gc.collect()
        if self._on_gpu:
            torch.cuda.empty_cache()
        self._asleep = set(SleepTag)
        seconds = time.monotonic() - started
        logger.info("asleep at level %d: %.2f GiB in %.1f s", level, given / 2**30, seconds)
        return given

    def wake_up(self, tags: Sequence[SleepTag]) -> None:
        """Wake up as in Executor. Raises LoadError or InvalidParameter for failed loads."""
        started = time.monotonic()
        if SleepTag.WEIGHTS in tags and SleepTag.WEIGHTS in self._asleep:
            self._take_weights()
            self._asleep.discard(SleepTag.WEIGHTS)
        if SleepTag.KV_CACHE in tags and SleepTag.KV_CACHE in self._asleep:
            self._take_slab()
            self._asleep.discard(SleepTag.KV_CACHE)
        if self._on_gpu and not self._asleep:
            gpu.capture(self._config, self._runner)
        logger.info("took %s again in %.1f s", ", ".join(tags), time.monotonic() - started)

    def close(self) -> None:
        """Free host memory, at the rank's end."""
        self._parked = None
        self._room.free()
        if self._runner.host is not None:
            self._runner.host.close()
            self._runner.host = None

    @property
    def _on_gpu(self) -> bool:
        return self._device.type == "cuda"

    def _park(self, level: int, awake: set[SleepTag]) -> int:
        """Take the steps that may fail: weights to host memory, the slab freed; all or nothing."""
        parked = None
        if level == 1 and self._on_gpu and SleepTag.WEIGHTS in awake:
            self._check_room()
            parked = ParkedWeights(self._runner.model, self._device, self._room)
        try:
            given = self._give_slab_back() if SleepTag.KV_CACHE in awake else 0
        except TandemError:
            if parked is not None:
                parked.restore()
            raise
        if parked is not None:
            self._parked = parked
            given += parked.nbytes
        return given

    def _check_room(self) -> None:
        """Raise InvalidParameter if the host or the pod lacks room for the weights."""
        needed = weight_bytes(self._runner.model, self._device) - self._room.nbytes
        there = available()
        if needed > there.nbytes:
            allowed = (
                f"2: weights take {needed / 2**30:.1f} GiB of host memory, of which {there.of} "
                f"has {there.nbytes / 2**30:.1f} left"
            )
            raise InvalidParameter("level", 1, allowed)

    def _give_slab_back(self) -> int:
        slab = self._runner.slab
        if not slab.memory.numel():
            return 0
        if isinstance(self._allocate, MappedAllocator):
            return self._allocate.give_back(slab.memory)
        return pages.give_back(slab.memory)

    def _take_slab(self) -> None:
        """Restore the slab and a tier's blocks, all or nothing."""
        slab, host = self._runner.slab, None
        if self._host_blocks:
            host = HostBlocks(slab.blocks, self._host_blocks)
        try:
            if isinstance(self._allocate, MappedAllocator) and slab.memory.numel():
                self._allocate.take_again(slab.memory)
        except TandemError:
            if host is not None:
                host.close()
            raise
        self._runner.host, self._host_blocks = host, 0

    def _take_weights(self) -> None:
        if self._parked is not None:
            self._parked.restore()
            self._parked = None
        if not self._dropped:
            return
        config = self._config
        with gpu.memory_for_weights(config, self._device), open_weights(config) as weights:
            model = load_model(config.facts, weights)
        if self._on_gpu and model.rotary is not None:
            model.rotary.tabulate(config.max_model_len)
        self._runner.model = model
        self._dropped = False
