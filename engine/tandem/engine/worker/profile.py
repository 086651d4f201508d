"""Measures the memory of steps next to weights and KV, by running the largest step once.

Its KV is written into one block repeatedly. Smaller steps are run only to compile their kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from tandem.engine.config import EngineConfig
from tandem.engine.sample import SamplingBatch, SamplingKind, score_prompt
from tandem.engine.worker.input_batch import batch_of
from tandem.engine.worker.inputs import StepStager, unpadded
from tandem.engine.worker.runner import PROMPT_LOGPROB_ROWS, ModelRunner
from tandem.engine.worker.step_rows import StepRows
from tandem.engine.worker.vectors import embedded_tokens
from tandem.kernels.attention.batch import short_batches
from tandem.protocol.card import blocks_for
from tandem.protocol.embeds import PromptEmbeds
from tandem.protocol.sampling import SamplingParams

SLACK = 1.05
"""Factor for fragmentation of the allocator's memory."""
SHORT_CHUNK = 32
"""Tokens of each prompt in a step of many, run to load the kernels of such steps."""

SHORT_LAYERS = 3
"""Layers of a decoder that run all its kernels: the first plans attention, the last differs."""


@torch.inference_mode()
def activation_bytes(config: EngineConfig, runner: ModelRunner, device: torch.device) -> int:
    """Return the device bytes of the largest step. ``runner`` has a KV cache of one block."""
    with _taken(device) as taken:
        largest_steps(config, runner, device)
    return taken[0]


@torch.inference_mode()
def choice_bytes(
    config: EngineConfig, runner: ModelRunner, device: torch.device, count: int
) -> int:
    """Return the bytes that graphs of choices of up to ``count`` rows share: logits, and the
    filtered copies."""
    batch = SamplingBatch(count)
    columns = batch.drawing_on(device)
    draws = torch.full((3, count), batch.max_rows, dtype=torch.int64, device=device)
    with _taken(device) as taken:
        logits = runner.model.logits(_random_hidden(config, device, count))
        runner.sampler.choose_alike(logits, SamplingKind.FILTERED, columns, draws)
        del logits
    return taken[0]


@contextmanager
def _taken(device: torch.device) -> Iterator[list[int]]:
    """Yield a list that gets, at the end of the block, the device bytes that torch took."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_reserved(device)
    taken: list[int] = []
    yield taken
    torch.cuda.synchronize(device)
    taken.append(int((torch.cuda.max_memory_reserved(device) - before) * SLACK))
    torch.cuda.empty_cache()


@torch.inference_mode()
def largest_steps(config: EngineConfig, runner: ModelRunner, device: torch.device) -> None:
    """Run steps with the most tokens, the most samples, and for every kernel."""
    budget, longest = config.scheduler.max_num_batched_tokens, config.max_model_len
    seats = config.scheduler.max_num_seqs
    whole, rest = divmod(budget, longest)
    _run_step(config, runner, ([longest] * whole + [rest] * bool(rest))[:seats])
    if config.facts.encoder is None:
        for count in (config.scheduler.max_num_samples, 1):
            _draw(config, runner, device, count)
    with shortened(runner):
        load_kernels(config, runner, device)


@contextmanager
def shortened(runner: ModelRunner, layers: int = SHORT_LAYERS) -> Iterator[None]:
    """Use a short model in the runner meanwhile."""
    whole = runner.model
    runner.model = whole.shortened(layers)
    try:
        yield
    finally:
        runner.model = whole


def load_kernels(config: EngineConfig, runner: ModelRunner, device: torch.device) -> None:
    """Run kernels that are built by number of prompts or sampling rows (powers of two and the
    maximum), or by the length of short chunks."""
    budget = config.scheduler.max_num_batched_tokens
    most = min(config.scheduler.max_num_seqs, budget)
    for count in _powers(most):
        _run_step(config, runner, [min(SHORT_CHUNK, config.max_model_len, budget // count)] * count)
    if config.facts.encoder is not None:
        return
    for count in _powers(min(config.scheduler.max_num_samples, budget)):
        runner.model.logits(_random_hidden(config, device, count))
    ranks = config.parallel.tensor_parallel_size
    heads, kv_heads = (n // ranks for n in (config.facts.num_heads, config.facts.num_kv_heads))
    for longest, count in short_batches(heads, kv_heads):
        if longest <= min(config.max_model_len, budget):
            others = min(count - 1, most - 1, budget - longest)
            _run_step(config, runner, [longest, *[1] * others])


def _powers(most: int) -> list[int]:
    return sorted({*(2**power for power in range(most.bit_length())), most})


def _run_step(config: EngineConfig, runner: ModelRunner, lengths: list[int]) -> None:
    with steps(config, runner, rows=len(lengths), tokens=sum(lengths)) as run:
        run(lengths)


@contextmanager
def steps(
    config: EngineConfig, runner: ModelRunner, *, rows: int, tokens: int, embedded: bool = True
) -> Iterator[Callable[[list[int]], torch.Tensor]]:
    """Yield a function that runs whole prompts of given lengths in one step, of at most ``rows``
    and ``tokens``, and returns hidden states [rows, hidden]. ``embedded``: as vectors, if
    supported."""
    block_size, device = config.cache.block_size, runner.stager.device
    batch = batch_of(config, rows)
    batch.reserve(tokens)
    stager = StepStager(batch, device, max_tokens=tokens, max_len=config.max_model_len)

    def run(lengths: list[int]) -> torch.Tensor:
        for row, length in enumerate(lengths):
            tables = [[0] * blocks_for(length, block_size)] * batch.groups
            batch.table.assign(row, [*tables, *[[0]] * batch.states])
        index, counts = np.arange(len(lengths)), np.array(lengths)
        decodes = len(lengths) if max(lengths) == 1 else 0
        of_step = StepRows(index, 0 * counts, counts, decodes, int(counts.sum()))
        vectors = None
        if embedded and config.model.enable_prompt_embeds:  # the widest dtype
            size = config.facts.hidden_size
            zeros = (PromptEmbeds("float32", size, bytes(4 * size * each)) for each in lengths)
            vectors = embedded_tokens(dict(enumerate(zeros)), of_step, device)
        inputs = stager.stage(of_step, of_step.ends, index, unpadded)
        return runner.hidden(inputs, () if vectors is None else (vectors,))

    kept, runner.stager = runner.stager, stager
    try:
        yield run
    finally:
        runner.stager = kept


def _draw(config: EngineConfig, runner: ModelRunner, device: torch.device, count: int) -> None:
    hidden = _random_hidden(config, device, count)
    every = tuple(range(config.facts.vocab_size))
    few = min(5, config.max_logprobs)
    for params in (
        SamplingParams(temperature=0.0, seed=0),
        SamplingParams(temperature=0.0, seed=0, repetition_penalty=1.1),
        SamplingParams(temperature=0.0, seed=0, allowed_token_ids=every),
        SamplingParams(temperature=1.0, seed=0),
        SamplingParams(temperature=1.0, seed=0, top_p=0.9, top_k=50, min_p=0.01, logprobs=few),
    ):
        batch = SamplingBatch(count)
        for row in range(count):
            batch.add(row, params, token_ids=(0,), num_prompt=1)
        runner.sampler.sample(
            runner.model.logits(hidden),
            batch,
            rows=range(count),
            positions=[0] * count,
            choices=[(0,)] * count,
        )
    part = hidden[:PROMPT_LOGPROB_ROWS]
    score_prompt(runner.model.logits(part), [0] * len(part), config.max_logprobs)


def _random_hidden(config: EngineConfig, device: torch.device, count: int) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, config.dtype)
    return torch.randn(count, config.facts.hidden_size, dtype=dtype, device=device)
