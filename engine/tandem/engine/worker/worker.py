"""One rank of a worker: loads its part of the model, takes its slab, runs the steps it is given.

Made and driven by an Executor; ``start`` is called once, then ``execute`` step by step from one
thread. The methods here are what ``Executor.collective`` can call by name.
"""

from __future__ import annotations

import logging

import torch

from tandem.engine.attention import select_backend
from tandem.engine.config import EngineConfig
from tandem.engine.executor.base import Capacity, SlabAllocator
from tandem.engine.loader import open_weights
from tandem.engine.models import load_model
from tandem.engine.sample import Sampler
from tandem.engine.scheduler.output import ModelRunnerOutput, SchedulerOutput
from tandem.engine.worker import capacity
from tandem.engine.worker.input_batch import InputBatch
from tandem.engine.worker.runner import ModelRunner
from tandem.engine.worker.slab import Slab
from tandem.engine.worker.threads import StepThreads

logger = logging.getLogger(__name__)


class Worker:
    """A rank of one engine."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._device = torch.device(config.device)
        self._runner: ModelRunner | None = None

    def start(self, allocate: SlabAllocator | None = None) -> Capacity:
        """Load weights, then take what memory they leave for KV.

        Raises InvalidParameter for a model or a setting that cannot be served, LoadError for
        weights that are missing, unexpected or broken.
        """
        config, layout = self._config, self._config.layout
        attention = select_backend(layout.groups[0], self._device)
        with open_weights(config, device=self._device) as weights:
            model = load_model(config.facts, weights)
        blocks = capacity.num_blocks(config, layout, self._device)
        slab = Slab(layout, blocks, self._device, allocate)
        self._runner = ModelRunner(
            model=model,
            attention=attention,
            slab=slab,
            batch=InputBatch(layout.block_size, config.scheduler.max_num_seqs),
            sampler=Sampler(config.facts.vocab_size),
            device=self._device,
            threads=StepThreads(self._device),
        )
        return Capacity(num_blocks=blocks, layout=layout, slab_address=slab.address)

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step."""
        return self.runner.execute(plan)

    def slab_blocks(self) -> torch.Tensor:
        """The slab as [num_blocks, block_bytes] uint8, for those who move blocks."""
        return self.runner.slab.blocks

    def stop(self) -> None:
        """Let go of weights and slab. May be called twice."""
        self._runner = None

    @property
    def runner(self) -> ModelRunner:
        """What ``start`` made."""
        assert self._runner is not None, "the worker has not started, or has stopped"
        return self._runner
