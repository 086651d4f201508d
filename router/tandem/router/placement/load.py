"""What a worker's load and cache come to, in prompt tokens: the unit of both cost functions.

A prompt token costs one. The weights say how many prompt tokens of delay another unit stands
for; the cost model that predicts times replaces this file behind the same policy interface.
"""

from __future__ import annotations

from tandem.router.placement.snapshot import LinkPace, PromptFacts, WorkerView

SEQUENCE_WEIGHT = 32.0
"""A running sequence slows a decode step about as much as this many prompt tokens."""
HANDOFF_SHARE = 0.1
"""Loading a token's KV costs the decode worker this much of computing it."""
DAMAGE_SHARE = 0.1
"""What a prompt token computed beside a running sequence costs that one, of what it costs its own
request."""
FULL_SHARE = 0.05
"""Below this share of free blocks a worker is about to preempt."""
FULL_PENALTY = 1e6
SUSPECT_PENALTY = 1e9


def uncached(prompt: PromptFacts, worker: WorkerView) -> int:
    """Tokens that the worker would have to compute; the last one always is."""
    return max(1, prompt.num_tokens - prompt.hits.get(worker.incarnation, 0))


def prefill_cost(prompt: PromptFacts, worker: WorkerView) -> float:
    """To prefill there."""
    return uncached(prompt, worker) + worker.pending_tokens + _penalty(worker)


def decode_cost(prompt: PromptFacts, worker: WorkerView) -> float:
    """To decode there with KV that a prefill worker brings."""
    loading = HANDOFF_SHARE * uncached(prompt, worker)
    return loading + worker.pending_tokens + _crowd(worker) + _penalty(worker)


def whole_cost(prompt: PromptFacts, worker: WorkerView) -> float:
    """To do both there."""
    return prefill_cost(prompt, worker) + _crowd(worker)


def wait_for_pair(producer: WorkerView, pace: LinkPace) -> float | None:
    """Seconds before a prefill worker could begin and its link is free; None while its rate is
    unknown."""
    rate = producer.prefill_tokens_per_s
    return producer.pending_tokens / rate + pace.wait if rate else None


def wait_for_whole(prompt: PromptFacts, worker: WorkerView, rate: float) -> float:
    """Seconds at a decode worker that does both halves, and what its running sequences lose.

    ``rate`` is the prefill rate to assume where its own is unknown, in tokens a second."""
    damage = DAMAGE_SHARE * uncached(prompt, worker) * worker.num_running
    return (worker.compute_tokens + damage) / (worker.prefill_tokens_per_s or rate)


def is_full(worker: WorkerView) -> bool:
    """Whether it is about to preempt."""
    return worker.free_share < FULL_SHARE and worker.num_requests > 0


def _crowd(worker: WorkerView) -> float:
    beyond = max(0, worker.num_requests - worker.max_num_seqs)
    return SEQUENCE_WEIGHT * (worker.num_requests + 8 * beyond)


def _penalty(worker: WorkerView) -> float:
    full = FULL_PENALTY if is_full(worker) else 0.0
    return full + (SUSPECT_PENALTY if worker.suspect else 0.0)
