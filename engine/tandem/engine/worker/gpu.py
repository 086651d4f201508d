"""Additional start of a worker on a CUDA device."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tandem.engine.config import EngineConfig
from tandem.engine.kv_memory import KVCacheAllocator
from tandem.engine.sample import SamplingKind
from tandem.engine.sample.bounds import BoundsStage
from tandem.engine.worker.drafts import Drawn
from tandem.engine.worker.graphs import encoder_shapes, step_shapes
from tandem.engine.worker.profile import (
    activation_bytes,
    choice_bytes,
    largest_steps,
    shortened,
)
from tandem.engine.worker.runner import ModelRunner
from tandem.engine.worker.staging import StepShape
from tandem.engine.worker.vectors import VectorStage
from tandem.kernels import Backend
from tandem.kernels.attention.batch import in_tiles
from tandem.memory.device import DeviceMemoryError, MappedAllocator
from tandem.protocol.errors import InvalidParameter

logger = logging.getLogger(__name__)

GRAPH_BYTES = 8 << 20
"""Bytes reserved for each graph, next to the shared activations."""
CHOICE_GRAPH_BYTES = 1 << 20
"""Bytes reserved for each graph of a choice, next to their shared memory."""
MOST_CAPTURED = 2048
"""Default tokens of a decoder's largest graph: longer prompts keep the device busy."""
GIB = 2**30


def prepare(config: EngineConfig, device: torch.device) -> None:
    """Set the device up before its first use. Raises InvalidParameter if there is none."""
    if not torch.cuda.is_available():
        raise InvalidParameter("device", config.device, "cpu: this torch sees no CUDA device")
    torch.cuda.set_device(0 if device.index is None else device.index)
    # Parts of a split sum are added in float32, as the sum itself is.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


@contextmanager
def memory_for_weights(config: EngineConfig, device: torch.device) -> Iterator[None]:
    """Raise InvalidParameter with the free memory if the weights do not fit."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info(device)
        text = (
            f"a model whose weights fit: {free / GIB:.2f} GiB of the device's {total / GIB:.2f} "
            f"were free when a tensor found no room"
        )
        raise InvalidParameter("model", config.model.model, text) from error


def step_bytes(config: EngineConfig, runner: ModelRunner, device: torch.device) -> int:
    """Return the memory to reserve for steps: measured activations, and graphs. Raises
    InvalidParameter if the largest step does not fit."""
    from tandem.kernels.launch.ahead import (
        building_ahead,
    )  # imports triton, which a CPU does not need

    try:
        with building_ahead(), shortened(runner):
            largest_steps(config, runner, device)
        activations = activation_bytes(config, runner, device)
        graphs = _graph_bytes(config, runner, device, activations)
    except torch.OutOfMemoryError as error:
        budget = config.scheduler.max_num_batched_tokens
        text = f"fewer tokens than a step finds memory for, {budget // 2} perhaps"
        raise InvalidParameter("max_num_batched_tokens", budget, text) from error
    logger.info("activations of the largest step: %.2f GiB", activations / GIB)
    return activations + graphs


def kv_cache_allocator(config: EngineConfig, device: torch.device) -> KVCacheAllocator | None:
    """Return the allocator of the KV cache; None is torch's, if the driver has no mapped memory."""
    try:
        allocator = MappedAllocator(device)
        allocator(1)
    except DeviceMemoryError as error:
        logger.warning("the KV KV cache takes torch's memory: %s", error)
        return None
    return allocator


@torch.inference_mode()
def capture(config: EngineConfig, runner: ModelRunner) -> None:
    """Capture the graphs of ``runner``'s steps; its KV cache has a spare block."""
    from tandem.kernels.launch.ahead import building_ahead

    shapes = _shapes(config)
    runner.batch.sampling.bounds = bounds = _bounds(config, runner.stager.device)
    if runner.drafts is not None:
        inputs = runner.stager.stage_nothing(StepShape(1, 0, 0))
        size, dtype = config.facts.hidden_size, getattr(torch, config.dtype)
        states = torch.zeros(1, size, dtype=dtype, device=runner.stager.device)
        last_tokens = runner.stager.staging.last_tokens
        runner.drafts.warm(inputs, last_tokens, Drawn(runner.model, states))
    if shapes and config.model.enable_prompt_embeds:
        most = max(each.tokens for each in shapes)
        runner.vectors = VectorStage(most, config.facts.hidden_size, runner.stager.device)
    if shapes:
        with building_ahead(), shortened(runner):
            for shape in shapes:
                runner.hidden(runner.stager.stage_nothing(shape))
        runner.graphs.capture(shapes, runner.stager, runner.hidden)
        runner.choices.capture(runner.graphs, runner.stager, runner.choose, bounds)
    elif _reads_device(config):
        size = config.facts.head_dim
        logger.warning("no CUDA graphs: attention of heads of %d runs in plain torch", size)
    gc.collect()
    gc.freeze()  # what lives as long as the engine is not collected during a step


def _graph_bytes(
    config: EngineConfig, runner: ModelRunner, device: torch.device, activations: int
) -> int:
    shapes = _shapes(config)
    largest = max((each.tokens for each in shapes), default=0)
    steps = len(shapes) * GRAPH_BYTES
    steps += activations * largest // config.scheduler.max_num_batched_tokens
    steps += 4 * config.scheduler.max_num_seqs * -(-config.facts.vocab_size // 32)  # bounds
    steps += 4 * largest * config.facts.hidden_size * config.model.enable_prompt_embeds  # vectors
    decodes = [each.decodes for each in shapes if not each.chunks]
    if not decodes:
        return steps
    choices = 2 * len(SamplingKind) * len(decodes) * CHOICE_GRAPH_BYTES
    return steps + choices + choice_bytes(config, runner, device, max(decodes))


def _bounds(config: EngineConfig, device: torch.device) -> BoundsStage:
    words = -(-config.facts.vocab_size // 32)
    return BoundsStage(config.scheduler.max_num_seqs, words, device)


def _reads_device(config: EngineConfig) -> bool:
    if config.gpu.attention_backend == Backend.TORCH.value:
        return True
    dtype: torch.dtype = getattr(torch, config.dtype)
    return config.facts.encoder is None and not in_tiles(config.facts.head_dim, dtype)


def _shapes(config: EngineConfig) -> list[StepShape]:
    if config.gpu.enforce_eager or _reads_device(config):
        return []
    tokens, captured = (
        config.scheduler.max_num_batched_tokens,
        config.gpu.max_cudagraph_capture_size,
    )
    rows = config.scheduler.max_num_seqs
    if config.facts.encoder is None:
        most = MOST_CAPTURED if captured is None else captured
        return step_shapes(
            max_rows=rows,
            max_tokens=tokens,
            max_captured=most,
            num_drafts=config.scheduler.num_speculative_tokens,
        )
    most = tokens if captured is None else captured
    return encoder_shapes(max_rows=rows, max_tokens=tokens, max_captured=most)
