"""The first placement policy: the longest cached prefix, then the least load.

Hands off from a prefill worker to a decode worker when that pair's link works and the prompt has
enough that is not cached where it would be decoded; otherwise the decode worker does all of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from zlib import crc32

from tandem.protocol.card import WorkerRole
from tandem.protocol.ids import Incarnation
from tandem.router.placement.base import Placement
from tandem.router.placement.load import (
    decode_cost,
    is_full,
    prefill_cost,
    wait_for_pair,
    wait_for_whole,
    whole_cost,
)
from tandem.router.placement.snapshot import (
    Exclusions,
    FleetSnapshot,
    LinkPace,
    PromptFacts,
    WorkerView,
)

DISAGGREGATED, AGGREGATED = "disaggregated", "aggregated"
_Cost = Callable[[PromptFacts, WorkerView], float]


@dataclass(frozen=True, slots=True)
class _Scored:
    worker: WorkerView
    cost: float

    @property
    def rank(self) -> tuple[float, int, Incarnation]:
        return (self.cost, self.worker.num_legs, self.worker.incarnation)


class PrefixLoadPolicy:
    """``min_handoff_tokens``: below this many uncached tokens a hand-off is not worth its trips.
    ``patience``: seconds that a hand-off may begin later than a decode worker could do it all."""

    def __init__(self, min_handoff_tokens: int, patience: float = math.inf) -> None:
        self.min_handoff_tokens = min_handoff_tokens
        self.patience = patience

    def place(
        self, prompt: PromptFacts, fleet: FleetSnapshot, now: float, exclusions: Exclusions
    ) -> Placement | None:
        """The cheapest worker or pair outside ``exclusions``; None when there is none."""
        usable = usable_workers(prompt, fleet, exclusions)
        decode = roomy(prompt, [each for each in usable if each.role is WorkerRole.DECODE])
        prefill = [
            worker
            for worker in usable
            if worker.role is WorkerRole.PREFILL and worker.incarnation not in exclusions.prefill
        ]
        if prompt.query_key is not None:
            return _by_key(prompt.query_key, prefill or decode)
        free = prompt.shape is None and (prompt.pooled or not exclusions.no_handoff)
        if prompt.one_token and prefill and free:
            return _alone(prompt, prefill, "it ends with its first token: the prefill worker's")
        if not decode:
            return None
        if prompt.pooled:
            return _alone(prompt, decode, "it ends with its prompt, and no prefill worker is free")
        prefill = [worker for worker in prefill if may_hand_over(prompt, worker)]
        rule = self._why_whole(prompt, decode, prefill, exclusions)
        if rule is None or prompt.shape == DISAGGREGATED:
            placement = _pair(prompt, decode, prefill, fleet, exclusions)
            if prompt.shape == DISAGGREGATED:
                return placement
            rule = "no prefill worker has a link to a decode worker"
            if placement is not None:
                overflow = self._why_overflow(prompt, placement, usable, fleet)
                if overflow is None:
                    return placement
                rule = overflow
        return _alone(prompt, decode, rule)

    def _why_whole(
        self,
        prompt: PromptFacts,
        decode: Sequence[WorkerView],
        prefill: Sequence[WorkerView],
        exclusions: Exclusions,
    ) -> str | None:
        if not prefill:
            return "no prefill worker that is up may hand it over"
        if exclusions.no_handoff:
            return "the last attempt does not hand off"
        if prompt.whole or prompt.shape == AGGREGATED:
            return "the request must run on one worker"
        best_hit = max(prompt.hits.get(worker.incarnation, 0) for worker in decode)
        if prompt.num_tokens - best_hit < self.min_handoff_tokens:
            return f"under {self.min_handoff_tokens} tokens are not cached on a decode worker"
        return None

    def _why_overflow(
        self,
        prompt: PromptFacts,
        placement: Placement,
        usable: Sequence[WorkerView],
        fleet: FleetSnapshot,
    ) -> str | None:
        """Why not even the best pair is worth waiting for."""
        producer = next(each for each in usable if each.incarnation == placement.prefill)
        assert placement.pair is not None
        waits = wait_for_pair(producer, fleet.paces.get(placement.pair, LinkPace()))
        if waits is None:
            return None
        able = [
            wait_for_whole(prompt, each, producer.prefill_tokens_per_s)
            for each in usable
            if each.role is WorkerRole.DECODE and not (each.suspect or is_full(each))
        ]
        if not able or waits - min(able) <= self.patience:
            return None
        return (
            f"a prefill worker and its link are {waits:.2f} s behind, a decode worker needs "
            f"{min(able):.2f} s"
        )


def usable_workers(
    prompt: PromptFacts, fleet: FleetSnapshot, exclusions: Exclusions
) -> list[WorkerView]:
    """Workers that may take the prompt, alone or with others."""
    return [
        worker
        for worker in fleet.workers
        if not worker.draining
        and _may_serve(prompt, worker)
        and prompt.num_tokens + (not prompt.pooled) <= worker.max_model_len
        and worker.incarnation not in exclusions.workers
        and prompt.fingerprint in (None, worker.fingerprint)
        and (worker.pools or not prompt.pooled)
    ]


def _may_serve(prompt: PromptFacts, worker: WorkerView) -> bool:
    """Users are served by admitted revisions, a canary by those that it names."""
    wanted = prompt.revisions.get(worker.role)
    return worker.admitted if wanted is None else worker.revision == wanted


def may_hand_over(prompt: PromptFacts, worker: WorkerView) -> bool:
    """Whether the prompt's KV is within what the worker may promise to others."""
    limit = worker.max_handoff_tokens
    return limit is None or prompt.num_tokens <= limit


def roomy(prompt: PromptFacts, decode: list[WorkerView]) -> list[WorkerView]:
    """Workers that can hold all that was asked for; where none can, all that hold the prompt."""
    whole = prompt.num_tokens + (prompt.max_new_tokens or 0)
    return [each for each in decode if whole <= each.max_model_len] or decode


def _by_key(key: str, workers: Sequence[WorkerView]) -> Placement | None:
    """The same worker for equal keys, as long as the same workers are there."""
    if not workers:
        return None
    ordered = sorted(workers, key=lambda each: each.incarnation)
    found = ordered[crc32(key.encode()) % len(ordered)]
    return Placement(found.incarnation, None, "its query is kept by one worker")


def _alone(prompt: PromptFacts, workers: Sequence[WorkerView], rule: str) -> Placement:
    scored = _score(prompt, workers, whole_cost)
    best = min(scored, key=lambda each: each.rank)
    return Placement(best.worker.incarnation, None, rule)


def _pair(
    prompt: PromptFacts,
    decode: Sequence[WorkerView],
    prefill: Sequence[WorkerView],
    fleet: FleetSnapshot,
    exclusions: Exclusions,
) -> Placement | None:
    producers = _score(prompt, prefill, prefill_cost)
    consumers = _score(prompt, decode, decode_cost)
    pairs = [
        (producer, consumer)
        for producer in producers
        for consumer in consumers
        if may_meet(producer.worker, consumer.worker, fleet, exclusions)
    ]
    if not pairs:
        return None
    producer, consumer = min(
        pairs, key=lambda pair: (pair[0].cost + pair[1].cost, pair[0].rank, pair[1].rank)
    )
    return Placement(consumer.worker.incarnation, producer.worker.incarnation, "hand-off")


def may_meet(
    producer: WorkerView, consumer: WorkerView, fleet: FleetSnapshot, exclusions: Exclusions
) -> bool:
    """Whether the link between them works and was not ruled out."""
    pair = (producer.incarnation, consumer.incarnation)
    return (
        producer.fingerprint == consumer.fingerprint
        and pair in fleet.links
        and pair not in exclusions.pairs
    )


def _score(prompt: PromptFacts, workers: Sequence[WorkerView], cost: _Cost) -> list[_Scored]:
    return [_Scored(worker, cost(prompt, worker)) for worker in workers]
