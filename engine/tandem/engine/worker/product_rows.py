"""Runs a library's products for many numbers of rows before a worker is ready, to load its kernels.

cuBLAS has a kernel for nearly every band of 8 rows up to a thousand, and of 16 after that. At times
it has another for the last number of a band. On an H100 with torch 2.11 it has 41 to 68 for each
weight of Qwen3-8B up to 8,192 rows. One is loaded at its first launch, in 3 to 40 ms in which the
device gets no other work: each decoded stream stalls. CUDA graphs load theirs at capture; this is
for steps without one.
"""

from __future__ import annotations

import logging
import time

import torch

from tandem.engine.config import EngineConfig
from tandem.engine.worker.profile import shortened, steps
from tandem.engine.worker.runner import ModelRunner

logger = logging.getLogger(__name__)

BANDS = ((8, 1024), (16, 2048), (64, 8192))
"""Rows of a band, and its upper end: beyond 2,048 a kernel has several bands of 16, and 64 rows
miss 2 of 201 kernels."""
_LAYERS = 2
"""Layers of the short model: a usual one, and the last, which has a weight cut in two."""


def product_rows(most: int) -> list[int]:
    """Return the first and the last number of each band up to ``most`` (or 8,192), ascending;
    ``most`` is the last of a band that it cuts."""
    top, start, rows = min(most, BANDS[-1][1]), 0, set[int]()
    for band, end in BANDS:
        for first in range(start, min(end, top), band):
            rows |= {first + 1, min(first + band, top)}
        start = end
    return sorted(rows)


@torch.inference_mode()
def load_products(config: EngineConfig, runner: ModelRunner) -> None:
    """Run steps of each of these numbers of tokens on a short model, and of each number of sampling
    rows, with the head. An encoder is skipped: its steps all have graphs."""
    if config.facts.encoder is not None:
        return
    started, budget = time.monotonic(), config.scheduler.max_num_batched_tokens
    seats = min(config.scheduler.max_num_seqs, budget // 2)
    longest = config.max_model_len
    counts = product_rows(budget)
    drawn = product_rows(max(1, seats))
    rows, tokens = max(drawn[-1], -(-counts[-1] // longest)), max(counts[-1], 2 * drawn[-1])
    with (
        shortened(runner, _LAYERS),
        steps(config, runner, rows=rows, tokens=tokens, embedded=False) as run,
    ):
        for count in reversed(counts):  # what the largest took of memory is cut for the others
            whole, rest = divmod(count, longest)
            run([longest] * whole + [rest] * bool(rest))
        for count in drawn:
            runner.model.logits(run([min(2, longest)] * count))
    if runner.stager.device.type == "cuda":
        torch.cuda.synchronize(runner.stager.device)
    took = time.monotonic() - started
    logger.info("products of %d numbers of rows were run in %.1f s", len(counts), took)
