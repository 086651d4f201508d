"""Workers and links that may serve a prompt. Pure."""

from __future__ import annotations

from tandem.router.placement.snapshot import Exclusions, FleetSnapshot, PromptFacts, WorkerView

FULL_SHARE = 0.05
"""Share of free blocks below which a worker is about to preempt."""
UNKNOWN_RESIDENCE = 1.0
"""Seconds that a request is assumed to hold its blocks before one has ended."""


def usable_workers(
    prompt: PromptFacts, fleet: FleetSnapshot, exclusions: Exclusions
) -> list[WorkerView]:
    """Return the workers that may serve the prompt, alone or in a pair."""
    return [
        worker
        for worker in fleet.workers
        if not worker.draining
        and _serves_revision(prompt, worker)
        and prompt.num_tokens + (not prompt.pooled) <= worker.max_model_len
        and worker.incarnation not in exclusions.workers
        and prompt.fingerprint in (None, worker.fingerprint)
        and (worker.pools or not prompt.pooled)
    ]


def may_hand_over(prompt: PromptFacts, worker: WorkerView) -> bool:
    """Return whether the prompt is within the worker's limit of hand-offs."""
    limit = worker.max_handoff_tokens
    return limit is None or prompt.num_tokens <= limit


def linked(
    producer: WorkerView, consumer: WorkerView, fleet: FleetSnapshot, exclusions: Exclusions
) -> bool:
    """Return whether the link between them is up and not excluded."""
    pair = (producer.incarnation, consumer.incarnation)
    return (
        producer.fingerprint == consumer.fingerprint
        and pair in fleet.links
        and pair not in exclusions.pairs
    )


def fitting(prompt: PromptFacts, workers: list[WorkerView]) -> list[WorkerView]:
    """Return the workers whose empty cache holds the prompt and a token. If there is none, return
    all: they refuse it with the reason."""
    return [each for each in workers if _fits(prompt, each)] or workers


def long_enough(prompt: PromptFacts, workers: list[WorkerView]) -> list[WorkerView]:
    """Return the workers whose context holds the whole answer, or all if none does."""
    whole = prompt.num_tokens + (prompt.max_new_tokens or 0)
    return [each for each in workers if whole <= each.max_model_len] or workers


def uncached(prompt: PromptFacts, worker: WorkerView) -> int:
    """Return the tokens that the worker would have to compute; the last one always is."""
    return max(1, prompt.num_tokens - prompt.hits.get(worker.incarnation, 0))


def is_full(worker: WorkerView) -> bool:
    """Return whether the worker is about to preempt."""
    return worker.free_share < FULL_SHARE and worker.num_requests > 0


def wait_for_room(prompt: PromptFacts, worker: WorkerView) -> float:
    """Return the seconds until blocks and a seat are free. Both become free as requests end."""
    if not worker.total_blocks:
        return 0.0
    blocks = -(-(uncached(prompt, worker) + worker.pending_tokens) // worker.block_size) + 1
    used = max(1, worker.total_blocks - worker.free_blocks)
    lacking = max(0, blocks - worker.free_blocks) / used
    seats = max(0, worker.num_requests + 1 - worker.max_num_seqs) / max(1, worker.max_num_seqs)
    return max(lacking, seats) * (worker.residence_s or UNKNOWN_RESIDENCE)


def _serves_revision(prompt: PromptFacts, worker: WorkerView) -> bool:
    """Return whether the worker is of a revision that serves users, or that a canary names."""
    wanted = prompt.revisions.get(worker.role)
    return worker.admitted if wanted is None else worker.revision == wanted


def _fits(prompt: PromptFacts, worker: WorkerView) -> bool:
    if prompt.pooled or not worker.total_blocks:
        return True
    return prompt.num_tokens < worker.total_blocks * worker.block_size
