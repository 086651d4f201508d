"""What a step needs beside weights and KV, measured: the largest step there can be is run once.

Its KV goes into one block over and over, its tokens mean nothing; what counts is what the memory
allocator had to take. Activations are bounded by the token budget, logits by the number of
sequences, so no later step takes more. Also loads and compiles the kernels of such steps.
"""

from __future__ import annotations

import torch

from tandem.engine.config import EngineConfig
from tandem.engine.sample import SamplingBatch, score_prompt
from tandem.engine.worker.input_batch import InputBatch
from tandem.engine.worker.inputs import StepStager, unpadded
from tandem.engine.worker.rows import StepRows
from tandem.engine.worker.runner import PROMPT_LOGPROB_ROWS, ModelRunner
from tandem.protocol.layout import blocks_for
from tandem.protocol.sampling import SamplingParams

SLACK = 1.05
"""For fragments: steps of other sizes cut the allocator's memory otherwise."""


@torch.inference_mode()
def activation_bytes(config: EngineConfig, runner: ModelRunner, device: torch.device) -> int:
    """Bytes of ``device`` that the largest step takes. ``runner`` has a slab of one block."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_reserved(device)
    _largest_step(config, runner, device)
    _largest_draw(config, runner, device)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_reserved(device) - before
    torch.cuda.empty_cache()
    return int(peak * SLACK)


def _largest_step(config: EngineConfig, runner: ModelRunner, device: torch.device) -> None:
    budget, longest = config.scheduler.max_num_batched_tokens, config.max_model_len
    lengths = [longest] * (budget // longest) + [budget % longest] * bool(budget % longest)
    lengths = lengths[: config.scheduler.max_num_seqs]
    block_size = config.cache.block_size
    batch = InputBatch(block_size, len(lengths))
    for row, length in enumerate(lengths):
        batch.table.assign(row, [0] * blocks_for(length, block_size))
    stager = StepStager(batch, device, max_tokens=sum(lengths), max_len=longest)
    index = torch.arange(len(lengths)).numpy()
    counts = torch.tensor(lengths).numpy()
    decodes = sum(1 for each in lengths if each == 1)
    rows = StepRows(index, 0 * counts, counts, decodes if decodes == len(lengths) else 0)
    kept, runner.stager = runner.stager, stager
    try:
        runner.hidden(stager.stage(rows, rows.ends, index, unpadded))
    finally:
        runner.stager = kept


def _largest_draw(config: EngineConfig, runner: ModelRunner, device: torch.device) -> None:
    """Every sequence draws under filters with scores; then a prompt is scored."""
    count = config.scheduler.max_num_seqs
    batch = SamplingBatch(count)
    params = SamplingParams(
        temperature=1.0, top_p=0.9, top_k=50, seed=0, logprobs=min(5, config.model.max_logprobs)
    )
    for row in range(count):
        batch.add(row, params, token_ids=(0,), num_prompt=1)
    hidden = torch.zeros(
        count, config.facts.hidden_size, dtype=runner.slab.layers[0].dtype, device=device
    ).normal_()
    runner.sampler.sample(
        runner.model.logits(hidden),
        batch,
        rows=range(count),
        positions=[0] * count,
        choices=[(0,)] * count,
    )
    few = hidden[:PROMPT_LOGPROB_ROWS]
    score_prompt(runner.model.logits(few), [0] * len(few), config.model.max_logprobs)
