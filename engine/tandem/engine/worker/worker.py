"""One rank of a worker: loads its part of the model, allocates its slab, runs the given steps.

Made and called by an Executor; ``start`` is called once, then ``launch`` step by step from one
thread.
"""

from __future__ import annotations

import logging
import time

import torch

from tandem.engine.attention import select_backend
from tandem.engine.config import EngineConfig
from tandem.engine.kv_memory import Capacity, SlabAllocator
from tandem.engine.loader import open_weights
from tandem.engine.logits_processors import ProcessorClasses, ProcessorContext
from tandem.engine.models import CausalModel, load_model
from tandem.engine.sample import Sampler
from tandem.engine.sample.processing import RowProcessors
from tandem.engine.step import SchedulerOutput, TokenMasks
from tandem.engine.threads import StepThreads
from tandem.engine.worker import capacity, gpu
from tandem.engine.worker.input_batch import InputBatch
from tandem.engine.worker.inputs import StepStager
from tandem.engine.worker.launched import LaunchedStep
from tandem.engine.worker.offload import HostBlocks
from tandem.engine.worker.product_rows import load_products
from tandem.engine.worker.rest import Rest
from tandem.engine.worker.runner import ModelRunner
from tandem.engine.worker.slab import Slab
from tandem.engine.worker.torch_profile import TorchProfile

logger = logging.getLogger(__name__)


class Worker:
    """A rank of one engine."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._device = torch.device(config.device)
        self._runner: ModelRunner | None = None
        self._rest: Rest | None = None
        self._profile = TorchProfile(0, on_gpu=self._device.type == "cuda")

    def start(self, allocate: SlabAllocator | None = None) -> Capacity:
        """Load weights, then allocate the memory left for KV.

        Raises InvalidParameter for a model or a setting that cannot be served (a device too small
        for it among them), LoadError for weights that are missing, unexpected or broken.
        """
        config, layout = self._config, self._config.layout
        started = time.monotonic()
        on_gpu = self._device.type == "cuda"
        if on_gpu:
            gpu.prepare(config, self._device)
        with gpu.memory_for_weights(config, self._device), open_weights(config) as weights:
            model = load_model(config.facts, weights)
        if on_gpu and model.rotary is not None:
            model.rotary.tabulate(config.max_model_len)
        runner = self._runner_of(model)
        kept = gpu.step_bytes(config, runner, self._device) if on_gpu else 0
        blocks = capacity.num_blocks(config, layout, self._device, step_bytes=kept)
        if on_gpu:
            allocate = allocate or gpu.slab_allocator(config, self._device)
        spare = 1 if on_gpu else 0
        runner.slab = Slab(layout, blocks, self._device, allocate, spare=spare)
        runner.stager = self._stager(runner.batch, blocks if on_gpu else None)
        slab_bytes = 0 if on_gpu else blocks * layout.block_bytes
        offloaded = capacity.num_cpu_blocks(config, layout, promised=slab_bytes)
        if offloaded:
            runner.host = HostBlocks(runner.slab.blocks, offloaded)
        if on_gpu:
            gpu.capture(config, runner)
            load_products(config, runner)
        if config.profiler.torch_profiler_dir is not None:
            self._profile.warm()
        self._rest = Rest(config, runner, allocate)
        self._runner = runner
        logger.info("rank ready in %.1f s", time.monotonic() - started)
        name = torch.cuda.get_device_name(self._device) if on_gpu else ""
        return Capacity(blocks, layout, offloaded, name, runner.graphs.sizes)

    def _runner_of(self, model: CausalModel) -> ModelRunner:
        """Return a runner over one block, while the number of blocks is not known."""
        config = self._config
        group = config.layout.groups[0]
        seats = config.scheduler.max_num_seqs
        batch = InputBatch(config.layout.block_size, seats, config.max_model_len)
        batch.sampling.processors = self._processors()
        return ModelRunner(
            model=model,
            attention=select_backend(group, self._device, config.gpu.attention_backend),
            slab=Slab(config.layout, 1, self._device),
            batch=batch,
            sampler=Sampler(config.facts.vocab_size),
            stager=self._stager(batch, None),
            threads=StepThreads(on_cpu=self._device.type == "cpu"),
        )

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
        )

    def launch(self, plan: SchedulerOutput) -> LaunchedStep:
        """Queue one step."""
        if self._profile.overdue:
            self._profile.end()
        return self.runner.launch(plan)

    def recorded(self, folder: str | None) -> str:
        """Begin a profile in ``folder``, or for None end and write it; return its path. Raises
        ProfileError. Called in the thread that launches steps."""
        return self._profile.stop() if folder is None else self._profile.start(folder)

    def draw(self, masks: TokenMasks) -> None:
        """Queue the samples of the step launched last, which awaits these masks."""
        self.runner.draw(masks)

    def slab_blocks(self) -> torch.Tensor:
        """Return the slab as [num_blocks, block_bytes] uint8, for transfers of blocks."""
        return self.runner.slab.blocks

    def stop(self) -> None:
        """Free weights, slab and host memory. May be called twice."""
        self._profile.close()
        if self._rest is not None:
            self._rest.close()
        self._runner = self._rest = None

    @property
    def rest(self) -> Rest:
        """Return the rank's memory, which can be freed and restored."""
        assert self._rest is not None, "the worker has not started, or has stopped"
        return self._rest

    @property
    def runner(self) -> ModelRunner:
        """Return the runner that ``start`` made."""
        assert self._runner is not None, "the worker has not started, or has stopped"
        return self._runner
