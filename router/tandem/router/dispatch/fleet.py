"""The dispatcher's knowledge of the fleet: caches, links and faults.

Entries of a worker are dropped with its incarnation.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from tandem.protocol.card import WorkerRole
from tandem.protocol.errors import FailCause
from tandem.protocol.ids import BlockHash, Incarnation
from tandem.protocol.outputs import BlockEvents
from tandem.router.dispatch.attempt import Attempt, Leg
from tandem.router.dispatch.job import Job, Observer
from tandem.router.dispatch.retry_policy import LINK_CAUSES, AttemptFailure
from tandem.router.placement.prefix_index import PrefixIndex
from tandem.router.placement.rates import (
    WRONG_BYTES,
    LinkHealth,
    Pair,
    WorkerHealth,
)
from tandem.router.placement.snapshot import (
    Arrivals,
    FleetSnapshot,
    LinkThroughput,
    PromptFacts,
    WorkerView,
)
from tandem.router.workers.connection import Worker
from tandem.router.workers.pool import WorkerPool, handoff_peers
from tandem.router.workers.rates import DecayedRate

_OWN_FAULTS = frozenset({"internal", "timeout"})


@dataclass(slots=True)
class LinkCount:
    """Counts of one hand-off link."""

    done: int = 0
    """Hand-offs with an output of the decode worker."""
    failed: int = 0
    """Attempts that failed by the link's fault."""
    tokens: int = 0
    """Prompt tokens of finished hand-offs."""
    rate: DecayedRate = field(default_factory=DecayedRate)
    """Hand-offs per second."""
    token_rate: DecayedRate = field(default_factory=DecayedRate)


class Fleet(Observer):
    """State of the fleet; listener of the pool."""

    def __init__(self, pool: WorkerPool, index: PrefixIndex) -> None:
        self.pool = pool
        self.index = index
        self.links = LinkHealth()
        self.health = WorkerHealth()
        self.handoffs: dict[Pair, LinkCount] = {}
        self._prompts, self._tokens = DecayedRate(1.0), DecayedRate(1.0)

    def asked(self, facts: PromptFacts, now: float) -> None:
        """Count a new prompt and its uncached tokens."""
        self._prompts.note(1, now)
        self._tokens.note(max(1, facts.num_tokens - max(facts.hits.values(), default=0)), now)

    def worker_up(self, worker: Worker) -> None:
        """Do nothing: its cache is not known yet."""

    def worker_lost(self, worker: Worker, reason: str) -> None:
        """Drop the data of an incarnation, except the record of wrong bytes."""
        self.index.drop(worker.incarnation)
        self.links.forget(worker.incarnation)
        self.health.forget(worker.incarnation)
        for pair in [pair for pair in self.handoffs if worker.incarnation in pair]:
            del self.handoffs[pair]

    def worker_blocks(self, worker: Worker, events: BlockEvents) -> None:
        self.index.apply(worker.incarnation, events)

    def tidy(self) -> None:
        """Remove a part of lost workers' data. Called periodically."""
        self.index.tidy()

    def answered(self, job: Job, attempt: Attempt, leg: Leg) -> None:
        pair = attempt.placement.pair
        if pair is not None and not leg.is_prefill:
            self.handed_over(pair, job.num_prompt)

    def ended(self, job: Job, attempt: Attempt, failure: AttemptFailure | None, now: float) -> None:
        if failure is not None:
            self.blame(failure, now)

    def blame(self, failure: AttemptFailure, now: float) -> None:
        """Count a failed attempt against its link or worker, but not refusals.

        For lost workers only wrong bytes are recorded.
        """
        if failure.cause is None:
            return
        pair = failure.pair
        if pair is not None:
            if failure.cause in WRONG_BYTES or self._knows(pair):
                self.links.failed(pair, failure.cause, now)
            if failure.cause in LINK_CAUSES:
                self._count(pair).failed += 1
        own = failure.cause in _OWN_FAULTS and (pair is None or failure.word == "internal")
        if own and failure.worker in self.pool.workers:
            self.health.fault(failure.worker, now)

    def quarantined(self) -> dict[Pair, FailCause]:
        """Return links between workers that are unused since wrong bytes came."""
        found = self.links.quarantined()
        return {pair: cause for pair, cause in found.items() if self._knows(pair)}

    def _knows(self, pair: Pair) -> bool:
        return all(each in self.pool.workers for each in pair)

    def usable_links(self, now: float) -> frozenset[Pair]:
        """Return healthy (prefill, decode) pairs whose link is up."""
        workers = self.pool.workers
        return frozenset(
            (peer, decode.incarnation)
            for decode in workers.values()
            if decode.role is WorkerRole.DECODE
            for peer, state in handoff_peers(decode, workers).items()
            if state.up and peer in workers and self.links.usable((peer, decode.incarnation), now)
        )

    def pull_links(self) -> frozenset[Pair]:
        """Return (holder, puller) pairs whose link is up, if the block size is equal."""
        workers = self.pool.workers
        return frozenset(
            (peer, puller.incarnation)
            for puller in workers.values()
            if puller.card.pull_peers
            for peer, state in puller.peers.items()
            if state.up and peer in workers and _lends_to(workers[peer], puller)
        )

    def snapshot(self, now: float) -> FleetSnapshot:
        """Return the workers that are up, as placement's input."""
        admitted = self.pool.admitted
        workers = self.pool.workers.values()
        views = tuple(
            self._view(worker, now, admitted=admitted is None or worker.note.template in admitted)
            for worker in workers
        )
        links, pulls = self.usable_links(now), self.pull_links()
        paces = {pair: self._pace(pair) for pair in links | pulls}
        arrivals = Arrivals(self._prompts.read(now), self._tokens.read(now))
        return FleetSnapshot(views, links, paces, pulls, arrivals)

    def _pace(self, pair: Pair) -> LinkThroughput:
        """Return the throughput of a link, as reported by its second end."""
        health = self.pool.workers[pair[1]].peers[pair[0]]
        return LinkThroughput(
            bytes_per_s=health.bytes_per_s,
            waiting_bytes=health.waiting_bytes,
            probed_bytes_per_s=health.probed_bytes_per_s,
        )

    def handed_over(self, pair: Pair, num_tokens: int) -> None:
        """Count a hand-off that a decode worker continues."""
        self.links.succeeded(pair)
        count, now = self._count(pair), time.monotonic()
        count.done += 1
        count.tokens += num_tokens
        count.rate.note(1, now)
        count.token_rate.note(num_tokens, now)

    def _count(self, pair: Pair) -> LinkCount:
        """Return the counts of a link; for unknown ends, counts that are not kept."""
        if pair not in self.handoffs and not self._knows(pair):
            return LinkCount()
        return self.handoffs.setdefault(pair, LinkCount())

    def hits(self, hashes: dict[str, tuple[BlockHash, ...]]) -> dict[Incarnation, int]:
        """Return cached prompt tokens per worker, by hashes for each fingerprint."""
        found: dict[Incarnation, int] = {}
        for worker in self.pool.workers.values():
            blocks = self.index.hits(worker.incarnation, hashes.get(worker.fingerprint, ()))
            if blocks:
                found[worker.incarnation] = blocks * worker.card.block_size
        return found

    def sleeps(self, *, pooled: bool = False) -> bool:
        """Return whether all possible workers sleep."""
        decode = self.pool.serving(WorkerRole.DECODE)
        able = [*decode, *self.pool.serving(WorkerRole.PREFILL)] if pooled else decode
        return bool(able) and all(worker.sleeps for worker in able)

    def servable(self, *, prefill: int, decode: int) -> str | None:
        """Return why a request could not be served, or None.

        Only linked prefill workers count. Without decode workers, one worker of either role serves.
        """
        problem = self._missing(prefill=prefill, decode=decode)
        others = self.pool.other_wires()
        if problem is None or not others:
            return problem
        where, protocol = next(iter(sorted(others.items())))
        return f"{problem}; {len(others)} have another protocol: {where} says {protocol!r}"

    def _missing(self, *, prefill: int, decode: int) -> str | None:
        if self.sleeps(pooled=decode == 0):
            return "asleep: every worker that could take a request sleeps"
        whole = self._serving()
        if not self.needs_decode(decode):
            up_alone = len(self.pool.serving(WorkerRole.PREFILL))
            if up_alone < prefill:
                return f"{up_alone} of {prefill} prefill workers are up"
            return None if whole else "no worker is up"
        able = {worker.incarnation for worker in self.pool.serving(WorkerRole.DECODE)}
        if len(able) < decode:
            return f"{len(able)} of {decode} decode workers are up"
        if prefill:
            up: set[Incarnation] = {w.incarnation for w in self.pool.serving(WorkerRole.PREFILL)}
            linked = {peer for worker in able for peer in self._peers_up(worker)} & up
            if len(linked) < prefill:
                return f"{len(linked)} of {prefill} prefill workers are linked to a decode worker"
        return None

    def needs_decode(self, decode: int) -> bool:
        """Return whether every answer requires a decode worker, of ``decode`` expected ones.

        Not if none is expected, or no model samples tokens.
        """
        whole = self._serving()
        return decode > 0 and (not whole or any(map(_generates, whole)))

    def _serving(self) -> list[Worker]:
        return [worker for role in WorkerRole for worker in self.pool.serving(role)]

    def _peers_up(self, decode: Incarnation) -> list[Incarnation]:
        peers = self.pool.workers[decode].peers
        return [peer for peer, state in peers.items() if state.up]

    def _view(self, worker: Worker, now: float, *, admitted: bool) -> WorkerView:
        load, card = worker.load, worker.card
        total = 0 if load is None else load.total_blocks // worker.blocks_per_span
        free = 0 if load is None else load.free_blocks // worker.blocks_per_span
        computing, loading = _pending(worker)
        return WorkerView(
            incarnation=worker.incarnation,
            role=worker.role,
            fingerprint=worker.compatibility,
            name=worker.name,
            max_model_len=card.max_model_len,
            max_num_seqs=card.max_num_seqs,
            max_handoff_tokens=card.max_handoff_tokens,
            num_running=load.num_running if load is not None else 0,
            num_waiting=load.num_waiting if load is not None else 0,
            waiting_tokens=computing + loading,
            loading_tokens=loading,
            prefill_tokens_per_s=load.prefill_tokens_per_s if load is not None else 0.0,
            num_decoding=load.num_decoding if load is not None else 0,
            context_tokens=load.context_tokens if load is not None else 0,
            decode_steps=load.decode_steps if load is not None else (),
            context_s=load.context_s if load is not None else 0.0,
            prompt_steps=load.prompt_steps if load is not None else (),
            mixed_steps=load.mixed_steps if load is not None else (),
            steepness=load.steepness if load is not None else 0.0,
            chunk_tokens=load.chunk_tokens if load is not None else 0,
            mixed_chunk_tokens=load.mixed_chunk_tokens if load is not None else 0,
            bounds_steps=load.bounds_steps if load is not None else False,
            residence_s=load.residence_s if load is not None else 0.0,
            prompt_share=load.prompt_share if load is not None else 0.0,
            prompts_per_s=load.prompts_per_s if load is not None else 0.0,
            total_blocks=total,
            free_blocks=free,
            block_size=card.block_size,
            token_bytes=worker.token_bytes,
            free_share=free / total if total else 1.0,
            num_legs=worker.num_legs,
            num_streams=worker.num_streams,
            leg_tokens=worker.leg_tokens,
            leg_compute_tokens=worker.leg_compute_tokens,
            leg_prompts=worker.leg_prompts,
            draining=worker.sleeps or not worker.takes_new,
            revision=worker.note.revision,
            admitted=admitted,
            pools=card.pooling is not None,
            takes_embeds=card.prompt_embeds is not None,
            suspect=self.health.suspect(worker.incarnation, now),
        )


def _lends_to(holder: Worker, puller: Worker) -> bool:
    return holder.card.pull_peers > 0 and holder.fingerprint == puller.fingerprint


def _pending(worker: Worker) -> tuple[int, int]:
    """Return prompt tokens that wait at a worker: to be computed, and to be loaded.

    They are this router's legs and the rest of the last report.
    """
    load = worker.load
    if load is None:
        return worker.leg_compute_tokens, worker.leg_tokens - worker.leg_compute_tokens
    then, then_computing = worker.reported
    others_computing = max(0, load.waiting_tokens - load.loading_tokens - then_computing)
    others_loading = max(0, load.loading_tokens - (then - then_computing))
    computing = worker.leg_compute_tokens + others_computing
    return computing, worker.leg_tokens - worker.leg_compute_tokens + others_loading


def _generates(worker: Worker) -> bool:
    pooling = worker.card.pooling
    return pooling is None or pooling.generates
