"""Whether a worker has room for a prompt, and how long that takes to come. Pure."""

from __future__ import annotations

from tandem.router.placement.load import uncached
from tandem.router.placement.snapshot import PromptFacts, WorkerView

UNKNOWN_RESIDENCE = 1.0
"""Seconds that a request is taken to hold its blocks before one has ended."""


def can_hold(prompt: PromptFacts, worker: WorkerView) -> bool:
    """Whether the prompt and a token would fit if nothing else were there."""
    if not worker.total_blocks:
        return True
    return prompt.num_tokens < worker.total_blocks * worker.block_size


def wait_for_room(prompt: PromptFacts, worker: WorkerView) -> float:
    """Seconds until blocks and a seat are free: they come back as requests end, of which no more
    run than there are seats; the others of a queue end in their turns."""
    if not worker.total_blocks:
        return 0.0
    blocks = -(-(uncached(prompt, worker) + worker.pending_tokens) // worker.block_size) + 1
    used = max(1, worker.total_blocks - worker.free_blocks)
    lacking = max(0, blocks - worker.free_blocks) / used
    seats = max(0, worker.num_requests + 1 - worker.max_num_seqs) / max(1, worker.max_num_seqs)
    residence = worker.residence_s or UNKNOWN_RESIDENCE
    return max(lacking, seats) * residence


def stay_of(*workers: WorkerView) -> float:
    """Seconds that a request stays where it decodes, by the worker where they stay longest: a
    prefill worker's mostly leave at once."""
    return max([each.residence_s for each in workers]) or UNKNOWN_RESIDENCE
