"""One rank of a worker: loads its part of the model, allocates its KV cache, runs the given
steps."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from tandem.engine.attention import select_backend
from tandem.engine.cache.groups import CacheGroups
from tandem.engine.config import EngineConfig
from tandem.engine.kv_memory import Capacity, KVCacheAllocator
from tandem.engine.loader import open_weights
from tandem.engine.logits_processors import ProcessorClasses, ProcessorContext
from tandem.engine.models import CausalModel, load_model
from tandem.engine.ranks import ALONE, Ranks
from tandem.engine.sample import Sampler
from tandem.engine.sample.batch import RowProcessors
from tandem.engine.step import SchedulerOutput, TokenMasks
from tandem.engine.threads import StepThreads
from tandem.engine.worker import gpu
from tandem.engine.worker.drafts import RowDrafts
from tandem.engine.worker.input_batch import InputBatch, batch_of
from tandem.engine.worker.inputs import StepStager
from tandem.engine.worker.kv_cache import KVCacheMemory, check_device
from tandem.engine.worker.launched import LaunchedStep
from tandem.engine.worker.medium import num_cpu_blocks, open_medium
from tandem.engine.worker.offload import available
from tandem.engine.worker.profile import shortened, steps
from tandem.engine.worker.proposers import proposer_of
from tandem.engine.worker.row_inputs import row_inputs
from tandem.engine.worker.runner import ModelRunner
from tandem.engine.worker.sleep_mode import RankMemory
from tandem.kernels.checked import comparing
from tandem.protocol.card import KVLayout
from tandem.protocol.errors import InvalidParameter, TandemError

logger = logging.getLogger(__name__)

MOST_SECONDS = 20.0
"""Seconds after which a profile ends with the next step."""


WRITE_SECONDS = 60.0
"""Seconds to wait at a rank's end for a profile to be written."""


class ProfileError(TandemError):
    """A profile that cannot be started, stopped or written; the text has the reason."""


class TorchProfile:
    """Profiles of one rank."""

    def __init__(self, rank: int, *, on_gpu: bool, clock: Callable[[], float] = time.monotonic):
        self._rank = rank
        self._clock = clock
        self._activities = [ProfilerActivity.CPU]
        if on_gpu:
            self._activities.append(ProfilerActivity.CUDA)
        self._running: tuple[profile, Path] | None = None
        self._until = 0.0
        self._writing: threading.Thread | None = None

    @property
    def overdue(self) -> bool:
        """Return whether a profile runs for too long."""
        return self._running is not None and self._clock() >= self._until

    def warm(self) -> None:
        """Load the profiler before any request waits for a step: it takes seconds."""
        recording = profile(activities=self._activities)
        recording.start()
        recording.stop()

    def start(self, folder: str) -> str:
        """Begin to record; return the path of the file to be written."""
        if self._running is not None:
            raise ProfileError(f"a profile is already being recorded, in {self._running[1]}")
        path = Path(folder)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ProfileError(f"no folder for profiles: {error}") from error
        stamp = time.strftime("%Y%m%d-%H%M%S")
        name = f"{socket.gethostname()}-{os.getpid()}-rank{self._rank}-{stamp}.pt.trace.json.gz"
        recording = profile(activities=self._activities)
        recording.start()
        self._running, self._until = (recording, path / name), self._clock() + MOST_SECONDS
        logger.info("a profile begins, for at most %g s", MOST_SECONDS)
        return str(path / name)

    def stop(self) -> str:
        """End the profile; return its path. The file is written later, in another thread."""
        if self._running is None:
            raise ProfileError("no profile is being recorded")
        (recording, path), self._running = self._running, None
        recording.stop()
        part = path.with_name("writing-" + path.name)
        try:
            # Otherwise the library reports a file that cannot be made on standard error only.
            part.touch()
        except OSError as error:
            raise ProfileError(f"the profile could not be written: {error}") from error
        self._writing = threading.Thread(target=_write, args=(recording, part, path))
        self._writing.start()
        return str(path)

    def close(self) -> None:
        """End a profile that is running, and wait until all are written."""
        self.end()
        if self._writing is not None:
            self._writing.join(WRITE_SECONDS)

    def end(self) -> None:
        if self._running is None:
            return
        try:
            self.stop()
        except ProfileError as error:
            logger.warning("%s", error)


def _write(recording: profile, part: Path, path: Path) -> None:
    try:
        recording.export_chrome_trace(str(part))
        part.rename(path)
    except (OSError, RuntimeError) as error:
        logger.warning("the profile could not be written: %s", error)
    else:
        logger.info("a profile was written: %s", path)


CPU_SHARE = 0.25
"""Default share of the free memory for KV: other workers use the same host."""
CPU_LIMIT_BYTES = 2 << 30
GIB = 2**30


def num_blocks(
    config: EngineConfig, layout: KVLayout, device: torch.device, *, step_bytes: int = 0
) -> int:
    """Return the blocks to allocate; ``step_bytes`` are reserved for steps and graphs.

    Raises InvalidParameter, with a number that would fit, if not even one block fits.
    """
    count = _wanted(config, layout, device, step_bytes)
    if count < 1:
        raise _too_small(config, layout, device, step_bytes)
    logger.info(
        "KV cache: %d tokens in %d blocks of %d, %.2f GiB; %.2f GiB kept for steps",
        _cache_groups(config, layout).max_tokens(count, count * layout.block_size),
        count,
        layout.block_size,
        count * layout.block_bytes / GIB,
        step_bytes / GIB,
    )
    return count


def _wanted(config: EngineConfig, layout: KVLayout, device: torch.device, step_bytes: int) -> int:
    if config.cache.num_gpu_blocks_override is not None:
        return config.cache.num_gpu_blocks_override
    if config.cache.kv_cache_memory_bytes is not None:
        return config.cache.kv_cache_memory_bytes // layout.block_bytes
    useful = config.scheduler.max_num_seqs * _sequence_blocks(config, layout)
    if not layout.block_bytes:
        return useful  # they hold nothing
    on_gpu = device.type == "cuda"
    ranks = config.parallel.tensor_parallel_size
    free = _device_bytes(config, device, step_bytes) if on_gpu else _host_bytes() // ranks
    return min(free // layout.block_bytes, useful)


def _cache_groups(config: EngineConfig, layout: KVLayout) -> CacheGroups:
    chunk = config.scheduler.max_num_batched_tokens
    return CacheGroups.of(layout.groups, layout.block_size, chunk)


def _sequence_blocks(config: EngineConfig, layout: KVLayout) -> int:
    return _cache_groups(config, layout).num_blocks(config.max_model_len)


def _device_bytes(config: EngineConfig, device: torch.device, step_bytes: int) -> int:
    free, total = torch.cuda.mem_get_info(device)
    allowed = int(total * config.cache.gpu_memory_utilization)
    return max(allowed - (total - free) - step_bytes, 0)


def _too_small(
    config: EngineConfig, layout: KVLayout, device: torch.device, step_bytes: int
) -> InvalidParameter:
    bytes_given = config.cache.kv_cache_memory_bytes
    if bytes_given is not None or device.type != "cuda":
        allowed = f"at least one block of {layout.block_bytes:,} bytes fits"
        return InvalidParameter("kv_cache_memory_bytes", bytes_given, allowed)
    free, total = torch.cuda.mem_get_info(device)
    sequence = _sequence_blocks(config, layout) * layout.block_bytes
    needed = total - free + step_bytes + sequence
    text = (
        f"weights, and what other processes hold, take {(total - free) / GIB:.2f} GiB of the "
        f"device's {total / GIB:.2f}, a step of {config.scheduler.max_num_batched_tokens} tokens "
        f"{step_bytes / GIB:.2f}, one sequence of {config.max_model_len} tokens "
        f"{sequence / GIB:.2f}: "
    )
    if needed <= total:
        text += f"{needed / total + 0.005:.2f} or more holds that"
    else:
        text += "lower max_num_batched_tokens or max_model_len, or take a larger or emptier device"
    return InvalidParameter("gpu_memory_utilization", config.cache.gpu_memory_utilization, text)


def _host_bytes() -> int:
    return min(int(available().nbytes * CPU_SHARE), CPU_LIMIT_BYTES)


BANDS = ((8, 1024), (16, 2048), (64, 8192))
"""Rows of a band, and its upper end: numbers of tokens with the same kernels, nearly."""
_LAYERS = 2
"""Layers of the short model: a usual one, and the last, which has a weight cut in two."""


def product_rows(most: int) -> list[int]:
    """Return the first and last number of each band up to ``most``, ascending."""
    top, start, rows = min(most, BANDS[-1][1]), 0, set[int]()
    for band, end in BANDS:
        for first in range(start, min(end, top), band):
            rows |= {first + 1, min(first + band, top)}
        start = end
    return sorted(rows)


COMPARED = (1, 16, 50, 100, 300, 2000)
"""Tokens of the steps whose products are compared."""


@torch.inference_mode()
def compare_products(config: EngineConfig, runner: ModelRunner) -> None:
    """Compare the products of a short model with plain torch, for several numbers of tokens. Wrong
    kernels are logged and not used."""
    if config.facts.encoder is not None:
        return
    device, budget = runner.stager.device, config.scheduler.max_num_batched_tokens
    counts = [n for n in COMPARED if n <= min(budget, config.max_model_len)]
    with (
        comparing(device),
        shortened(runner, _LAYERS),
        steps(config, runner, rows=1, tokens=counts[-1], embedded=False) as run,
    ):
        for count in counts:
            runner.model.logits(run([count]))


@torch.inference_mode()
def load_products(config: EngineConfig, runner: ModelRunner) -> None:
    """Run steps of these numbers of tokens and of sampling rows on a short model, with the head.
    Skip an encoder, whose steps all have graphs."""
    if config.facts.encoder is not None:
        return
    started, budget = time.monotonic(), config.scheduler.max_num_batched_tokens
    seats = min(config.scheduler.max_num_seqs, budget // 2)
    longest = config.max_model_len
    counts = product_rows(budget)
    head_rows = product_rows(max(1, seats))
    rows, tokens = max(head_rows[-1], -(-counts[-1] // longest)), max(counts[-1], 2 * head_rows[-1])
    with (
        shortened(runner, _LAYERS),
        steps(config, runner, rows=rows, tokens=tokens, embedded=False) as run,
    ):
        for count in reversed(counts):  # the largest one's memory is cut for the others
            whole, rest = divmod(count, longest)
            run([longest] * whole + [rest] * bool(rest))
        for count in head_rows:
            runner.model.logits(run([min(2, longest)] * count))
    if runner.stager.device.type == "cuda":
        torch.cuda.synchronize(runner.stager.device)
    took = time.monotonic() - started
    logger.info("products of %d numbers of rows were run in %.1f s", len(counts), took)


class Worker:
    """A rank of one engine."""

    def __init__(self, config: EngineConfig, ranks: Ranks = ALONE) -> None:
        self.ranks = ranks
        self._config = config
        self._device = torch.device(config.device)
        self._runner: ModelRunner | None = None
        self._rest: RankMemory | None = None
        self._profile = TorchProfile(ranks.rank, on_gpu=self._device.type == "cuda")

    def start(self, allocate: KVCacheAllocator | None = None) -> Capacity:
        """Load weights, then allocate the memory left for KV; call once.

        Raises InvalidParameter for an unsupported model or setting, also for a device that is too
        small, LoadError for invalid weights.
        """
        config, layout = self._config, self._config.layout
        started = time.monotonic()
        on_gpu = self._device.type == "cuda"
        check_device(config.layer_groups, self._device)
        if on_gpu:
            gpu.prepare(config, self._device)
        with (
            gpu.memory_for_weights(config, self._device),
            open_weights(config, ranks=self.ranks) as weights,
        ):
            model = load_model(config.facts, weights)
        if on_gpu:
            for rotary in model.rotaries:
                rotary.tabulate(config.max_model_len)
        runner = self._runner_of(model)
        if on_gpu:
            compare_products(config, runner)
        kept = gpu.step_bytes(config, runner, self._device) if on_gpu else 0
        blocks = self.ranks.least(num_blocks(config, layout, self._device, step_bytes=kept))
        if on_gpu:
            allocate = allocate or gpu.kv_cache_allocator(config, self._device)
        spare = 1 if on_gpu else 0
        runner.kv_cache = self._kv_cache(blocks, allocate, spare=spare)
        runner.stager = self._stager(runner.batch, blocks if on_gpu else None)
        kv_cache_bytes = 0 if on_gpu else blocks * layout.block_bytes
        offloaded = num_cpu_blocks(config, layout, promised=kv_cache_bytes)
        if offloaded:
            runner.host = open_medium(config, runner.kv_cache.blocks, offloaded)
        if on_gpu:
            gpu.capture(config, runner)
            load_products(config, runner)
        if config.profiler.torch_profiler_dir is not None:
            self._profile.warm()
        self._rest = RankMemory(config, runner, allocate, self.ranks)
        self._runner = runner
        logger.info("rank ready in %.1f s", time.monotonic() - started)
        name = torch.cuda.get_device_name(self._device) if on_gpu else ""
        return Capacity(blocks, layout, offloaded, name, runner.graphs.sizes)

    def _runner_of(self, model: CausalModel) -> ModelRunner:
        config = self._config
        seats = config.scheduler.max_num_seqs
        batch = batch_of(config, seats, config.max_model_len)
        batch.sampling.processors, batch.inputs = self._processors(), row_inputs(config)
        return ModelRunner(
            model=model,
            attention=select_backend(
                config.layout.groups, self._device, config.gpu.attention_backend
            ),
            kv_cache=self._kv_cache(1),
            batch=batch,
            sampler=Sampler(config.facts.vocab_size),
            stager=self._stager(batch, None),
            threads=StepThreads(on_cpu=self._device.type == "cpu"),
            drafts=self._drafts(batch),
        )

    def _kv_cache(
        self, blocks: int, allocate: KVCacheAllocator | None = None, *, spare: int = 0
    ) -> KVCacheMemory:
        config = self._config
        return KVCacheMemory(
            config.layer_groups,
            blocks,
            self._device,
            allocate,
            spare=spare,
            scales=config.kv_scales,
            ranks=self.ranks,
        )

    def _drafts(self, batch: InputBatch) -> RowDrafts | None:
        proposer, longest = proposer_of(self._config), self._config.max_model_len
        if proposer is None:
            return None
        most = self._config.scheduler.num_speculative_tokens
        return RowDrafts(proposer, batch, self._device, max_len=longest, most=most)

    def _processors(self) -> RowProcessors | None:
        classes = ProcessorClasses(self._config.model.logits_processors)
        if not classes.classes:
            return None
        logger.info("logits processors: %s", ", ".join(each.__name__ for each in classes.classes))
        context = ProcessorContext(
            vocab_size=self._config.facts.vocab_size,
            max_rows=self._config.scheduler.max_num_seqs,
            device=self._device,
        )
        return RowProcessors(classes, context)

    def _stager(self, batch: InputBatch, spare_block: int | None) -> StepStager:
        return StepStager(
            batch,
            self._device,
            max_tokens=self._config.scheduler.max_num_batched_tokens,
            max_len=self._config.max_model_len,
            spare_block=spare_block,
            whole=self._config.facts.encoder is not None,
            history=self._config.scheduler.lookup is not None,
        )

    def launch(self, plan: SchedulerOutput) -> LaunchedStep:
        if self._profile.overdue:
            self._profile.end()
        return self.runner.launch(plan)

    def recorded(self, folder: str | None) -> str:
        """Begin a profile in ``folder``, or for None end and write it; return its path. Raises
        ProfileError. Call in the thread that launches steps."""
        return self._profile.stop() if folder is None else self._profile.start(folder)

    def draw(self, masks: TokenMasks) -> None:
        self.runner.draw(masks)

    def kv_cache_blocks(self) -> torch.Tensor:
        """Return the KV cache as [num_blocks, block_bytes] uint8."""
        return self.runner.kv_cache.blocks

    def stop(self) -> None:
        self._profile.close()
        if self._rest is not None:
            self._rest.close()
        self._runner = self._rest = None

    @property
    def rest(self) -> RankMemory:
        """Return the rank's memory, which can be freed and restored."""
        assert self._rest is not None, "the worker has not started, or has stopped"
        return self._rest

    @property
    def runner(self) -> ModelRunner:
        assert self._runner is not None, "the worker has not started, or has stopped"
        return self._runner
