"""Memory that a rank frees while its engine sleeps, and its return.

KV memory keeps its addresses, which transports and graphs use. Weights are moved to host memory at
level 1 (not a CPU's), and dropped and loaded again at level 2. A GPU's graphs are dropped and
captured again.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Iterator, Sequence
from itertools import accumulate
from types import (
    BuiltinFunctionType,
    CellType,
    FunctionType,
    ModuleType,
)

import torch
from torch import Tensor

from tandem.engine.config import EngineConfig
from tandem.engine.kv_memory import KVCacheAllocator
from tandem.engine.loader import open_weights
from tandem.engine.models import load_model
from tandem.engine.ranks import Ranks
from tandem.engine.worker import gpu
from tandem.engine.worker.graphs import SamplerGraphs, StepGraphs
from tandem.engine.worker.medium import open_medium
from tandem.engine.worker.offload import available
from tandem.engine.worker.runner import ModelRunner
from tandem.memory import page_locked
from tandem.memory.device import MappedAllocator
from tandem.memory.page_locked import HostMemory, Registrar, registrar_for
from tandem.protocol.commands import SleepTag
from tandem.protocol.errors import InvalidParameter, TandemError

_APART = 256
"""Alignment of each tensor in bytes, as on a GPU."""
_OUTSIDE = (ModuleType, type, BuiltinFunctionType)
"""Types with references beyond a model."""


class WeightBuffer:
    """Host memory for a model's weights, page-locked for a GPU. Kept while the rank is awake, as
    locking is slow."""

    def __init__(self, registrar: Registrar | None) -> None:
        self._registrar = registrar
        self._memory: HostMemory | None = None

    @property
    def nbytes(self) -> int:
        return 0 if self._memory is None else self._memory.nbytes

    def take(self, nbytes: int) -> Tensor:
        """Return ``nbytes`` flat uint8 bytes of any content. Raises HostMemoryError."""
        if self._memory is None or self._memory.nbytes < nbytes:
            self.free()
            self._memory = HostMemory(nbytes, self._registrar)
        return self._memory.tensor

    def free(self) -> None:
        if self._memory is not None:
            self._memory.free()
            self._memory = None


class OffloadedWeights:
    """Parked tensors of a model on one device."""

    def __init__(self, model: object, device: torch.device, room: WeightBuffer) -> None:
        """Copy all into ``room``, then empty them. Raises HostMemoryError before anything is
        emptied."""
        storages = list(storages_of(model, device))
        sizes = [each.nbytes() for each in storages]
        places = list(accumulate((-(-each // _APART) * _APART for each in sizes), initial=0))
        memory = room.take(places[-1])
        self._parked = [
            (storage, memory[at : at + size])
            for storage, at, size in zip(storages, places, sizes, strict=False)
        ]
        self.nbytes = sum(sizes)
        for storage, copy in self._parked:
            copy.copy_(_bytes(storage))
        for storage in storages:
            storage.resize_(0)

    def restore(self) -> None:
        """Fill the tensors again. Raises RuntimeError without enough device memory; then none is
        filled, and it may be called again."""
        try:
            for storage, copy in self._parked:
                storage.resize_(len(copy))
                _bytes(storage).copy_(copy)
        except RuntimeError:
            for storage, _ in self._parked:
                storage.resize_(0)
            raise


def storages_of(model: object, device: torch.device) -> Iterator[torch.UntypedStorage]:
    """Yield each storage on ``device`` that ``model`` refers to, once."""
    seen: set[int] = set()
    for tensor in _tensors(model):
        if lies_on(device, tensor.device) and tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                yield storage


def weight_bytes(model: object, device: torch.device) -> int:
    """Return the bytes of a model's weights on ``device``, packed ones included."""
    packed = (each for each in _tensors(model) if each.layout is not torch.strided)
    own = sum(each.numel() * each.element_size() for each in packed if lies_on(device, each.device))
    return own + sum(each.nbytes() for each in storages_of(model, device))


def lies_on(device: torch.device, there: torch.device) -> bool:
    """Return whether ``there`` is ``device``, which may lack an index ("cuda", the current GPU)."""
    return there.type == device.type and device.index in (None, there.index)


def _tensors(model: object) -> Iterator[Tensor]:
    seen: set[int] = set()
    left = [model]
    while left:
        each = left.pop()
        if id(each) in seen or isinstance(each, _OUTSIDE):
            continue
        seen.add(id(each))
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, FunctionType):  # follow its closure, not its globals
            left.extend(each.__closure__ or ())
        elif isinstance(each, CellType):
            left.append(each.cell_contents)
        else:
            left.extend(gc.get_referents(each))


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


logger = logging.getLogger(__name__)


class RankMemory:
    """Memory of a rank, awake or asleep; called between steps."""

    def __init__(
        self,
        config: EngineConfig,
        runner: ModelRunner,
        allocate: KVCacheAllocator | None,
        ranks: Ranks,
    ) -> None:
        """``runner`` has started; ``allocate`` allocated its KV cache, None: torch did."""
        self._ranks = ranks
        self._config = config
        self._runner = runner
        self._allocate = allocate
        self._device = torch.device(config.device)
        self._host_blocks = 0
        """Blocks of an offload tier, while it has no memory."""
        self._room = WeightBuffer(registrar_for(self._device))
        self._parked: OffloadedWeights | None = None
        self._asleep: set[SleepTag] = set()
        self._dropped = False
        """Whether weights are to be loaded again."""

    def sleep(self, level: int) -> int:
        """Sleep as in Executor. Also raises InvalidParameter if torch allocated a GPU's KV
        cache."""
        awake = set(SleepTag) - self._asleep
        started = time.monotonic()
        if self._on_gpu and not isinstance(self._allocate, MappedAllocator):
            allowed = "none: this driver has no mapped memory for the KV cache to give back"
            raise InvalidParameter("level", level, allowed)
        runner = self._runner
        if self._on_gpu:
            torch.cuda.synchronize(self._device)
            runner.graphs, runner.choices = StepGraphs(), SamplerGraphs()
            runner.batch.sampling.bounds = None
        try:
            given = self._park(level, awake)
        except (TandemError, RuntimeError):
            if self._on_gpu and not self._asleep:
                gpu.capture(self._config, runner)
            raise
        if runner.host is not None:
            self._host_blocks = runner.host.num_blocks
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
            self._take_kv_cache()
            self._asleep.discard(SleepTag.KV_CACHE)
        if self._on_gpu and not self._asleep:
            gpu.capture(self._config, self._runner)
        logger.info("took %s again in %.1f s", ", ".join(tags), time.monotonic() - started)

    def close(self) -> None:
        self._parked = None
        self._room.free()
        if self._runner.host is not None:
            self._runner.host.close()
            self._runner.host = None

    @property
    def _on_gpu(self) -> bool:
        return self._device.type == "cuda"

    def _park(self, level: int, awake: set[SleepTag]) -> int:
        parked = None
        if level == 1 and self._on_gpu and SleepTag.WEIGHTS in awake:
            self._check_room()
            parked = OffloadedWeights(self._runner.model, self._device, self._room)
        try:
            given = self._return_kv_cache() if SleepTag.KV_CACHE in awake else 0
        except TandemError:
            if parked is not None:
                parked.restore()
            raise
        if parked is not None:
            self._parked = parked
            given += parked.nbytes
        return given

    def _check_room(self) -> None:
        needed = weight_bytes(self._runner.model, self._device) - self._room.nbytes
        there = available()
        if needed > there.nbytes:
            allowed = (
                f"2: weights take {needed / 2**30:.1f} GiB of host memory, of which {there.of} "
                f"has {there.nbytes / 2**30:.1f} left"
            )
            raise InvalidParameter("level", 1, allowed)

    def _return_kv_cache(self) -> int:
        kv_cache = self._runner.kv_cache
        if not kv_cache.memory.numel():
            return 0
        if isinstance(self._allocate, MappedAllocator):
            return self._allocate.give_back(kv_cache.memory)
        return page_locked.give_back(kv_cache.memory)

    def _take_kv_cache(self) -> None:
        kv_cache, host = self._runner.kv_cache, None
        if self._host_blocks:
            host = open_medium(self._config, kv_cache.blocks, self._host_blocks)
        try:
            if isinstance(self._allocate, MappedAllocator) and kv_cache.memory.numel():
                self._allocate.take_again(kv_cache.memory)
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
        with (
            gpu.memory_for_weights(config, self._device),
            open_weights(config, ranks=self._ranks) as weights,
        ):
            model = load_model(config.facts, weights)
        for rotary in model.rotaries if self._on_gpu else ():
            rotary.tabulate(config.max_model_len)
        self._runner.model = model
        self._dropped = False
