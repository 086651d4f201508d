"""Elastic placement as it is defined: each way's forecast by itself, from first term to last.

The policy computes what hangs on one worker once for each, and what is the same for a fleet once
for all. This computes all of it anew for each way, for tests to compare. The two have in common
the terms that have tests of their own (``damage``, ``answers``) and the times of single steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tandem.protocol.card import WorkerRole
from tandem.protocol.ids import Incarnation
from tandem.protocol.steps import Crowd, StepTimes, crowd_seconds, decode_seconds
from tandem.router.placement.answers import expected_tokens, lengthened, token_seconds
from tandem.router.placement.damage import (
    ALLOWED_GAPS,
    Demand,
    Targets,
    behind,
    first_missed,
    gap_missed,
    joining,
    kept_from_prompts,
    own_gaps,
)
from tandem.router.placement.ends import SUSPECT
from tandem.router.placement.forecast import (
    ANSWER,
    HELD_SHARE,
    MISS,
    PREEMPTING,
    UNKNOWN_TAIL,
    Forecast,
    held_back,
)
from tandem.router.placement.load import is_full, uncached
from tandem.router.placement.prefix_load import may_hand_over, may_meet, roomy, usable_workers
from tandem.router.placement.pulls import ROUND_SECONDS, PullPlan
from tandem.router.placement.rates import Rates, as_taught, chunk_of, mixed_chunk_of
from tandem.router.placement.room import can_hold, wait_for_room
from tandem.router.placement.snapshot import (
    Exclusions,
    FleetSnapshot,
    LinkPace,
    PromptFacts,
    WorkerView,
)

P, D = WorkerRole.PREFILL, WorkerRole.DECODE


class PlainRates(Rates):
    """Times of steps that are computed each time they are asked for."""

    def decodes(self, crowd: Crowd) -> float:
        """From the points."""
        return crowd_seconds(self.decode, self.context_s, crowd)


def rates_of(worker: WorkerView, fleet: Sequence[WorkerView]) -> Rates | None:
    """What the worker measured, or else the first of the fleet that did."""
    everybody = (worker, *fleet)
    prompt = next((each for each in everybody if each.prompt_steps), None)
    if prompt is None:
        return None
    beside = next((each.beside_steps for each in everybody if each.beside_steps), ())
    context_s = next((each.context_s for each in everybody if each.context_s), 0.0)
    steps = prompt.prompt_steps, beside
    return PlainRates(_decode_steps(everybody), *steps, context_s, prompt.steepness)


def _decode_steps(workers: Sequence[WorkerView]) -> StepTimes:
    known = [each.decode_steps for each in workers if each.decode_steps]
    own = known[0] if known else ()
    for other in known[1:]:
        most, seconds = own[-1]
        start = decode_seconds(other, most)
        own += tuple((n, seconds + max(0.0, s - start)) for n, s in other if n > most)
    return own


@dataclass(frozen=True)
class Reference:
    """The policy's settings."""

    least: int
    patience: float
    targets: Targets

    def choose(self, ways: Sequence[Forecast]) -> tuple[Forecast, list[Forecast]]:
        """The way that is taken of ``ways``, and all of them by what they cost."""
        best = min(ways, key=_rank)
        pairs = [each for each in ways if each.way == "pair"]
        if pairs and min(pairs, key=_rank).cost <= best.cost + self.patience:
            best = min(pairs, key=_rank)
        return best, sorted(ways, key=_rank)

    def ways(
        self, prompt: PromptFacts, fleet: FleetSnapshot, exclusions: Exclusions
    ) -> list[Forecast]:
        """Pairs first, then decode workers, then prefill workers."""
        found = usable_workers(prompt, fleet, exclusions)
        known = {each.incarnation: rates_of(each, fleet.workers) for each in found}
        rates = {name: each for name, each in known.items() if each is not None}
        if not rates:
            return []
        usable = [as_taught(each, rates[each.incarnation], self.targets.itl) for each in found]
        fits = [each for each in usable if can_hold(prompt, each)]
        decode = roomy(prompt, [each for each in fits if each.role is D])
        prefill = [
            each for each in fits if each.role is P and each.incarnation not in exclusions.prefill
        ]
        tokens = expected_tokens(prompt, usable, rates)
        ways = []
        for producer in prefill if not (exclusions.no_handoff or prompt.whole) else ():
            for consumer in decode:
                cached = prompt.hits.get(consumer.incarnation, 0)
                if not may_hand_over(prompt, producer) or prompt.num_tokens - cached < self.least:
                    continue
                if not may_meet(producer, consumer, fleet, exclusions):
                    continue
                pace = fleet.paces.get((producer.incarnation, consumer.incarnation), LinkPace())
                both = rates[producer.incarnation], rates[consumer.incarnation]
                ways += [
                    self._pair(prompt, producer, consumer, pace, both, tokens, pull)
                    for pull in _pulls(prompt, fleet, rates, producer)
                ]
        whole = decode
        if not math.isinf(self.patience) and any(each.role is D for each in fleet.workers):
            whole = decode + roomy(prompt, prefill)
        for worker in whole:
            for pull in _pulls(prompt, fleet, rates, worker):
                args = rates[worker.incarnation], usable, fleet, tokens, pull
                ways.append(self._whole(prompt, worker, *args))
        return ways

    def _pair(
        self,
        prompt: PromptFacts,
        producer: WorkerView,
        consumer: WorkerView,
        pace: LinkPace,
        rates: tuple[Rates, Rates],
        tokens: float,
        pull: PullPlan | None,
    ) -> Forecast:
        (fast, slow), targets = rates, self.targets
        own = _own(prompt, producer, pull)
        cached, chunk, crowd = prompt.num_tokens - own, chunk_of(producer), producer.crowd
        alone = fast.compute(own, chunk, crowd, cached)
        ttft = _queued(fast, producer.pending_tokens, own, producer) + alone + _seconds(pull)
        joined = consumer.crowd.joined(prompt.num_tokens)
        step = slow.decodes(joined)
        second = pace.tail_s if pace.tail_s is not None else UNKNOWN_TAIL
        second += pace.wait + step
        second += wait_for_room(prompt, consumer)
        damage = first_missed(ttft, targets) + first_missed(second, targets)
        damage += behind(producer, ttft, alone, targets)
        damage += joining(slow, consumer.crowd, prompt.num_tokens, targets)
        damage += own_gaps(slow, consumer, joined, consumer.prompt_share, targets)
        if crowd.streams:
            stays = max(producer.residence_s, consumer.residence_s) or 1.0
            damage += self._mixed_in(fast, producer, (own, cached), stays)
        answers = _answers(slow, consumer.crowd, prompt, tokens, consumer.prompt_share)
        answers += crowd.streams * fast.added(own, chunk, cached)
        cost = ttft + second + MISS * damage + ANSWER * answers
        cost += SUSPECT * producer.suspect + SUSPECT * consumer.suspect
        hold = held_back(pace, step, ttft, targets), HELD_SHARE * targets.ttft
        both = consumer.incarnation, producer.incarnation
        return Forecast("pair", *both, ttft, second, damage, cost, answers, pull, *hold)

    def _whole(
        self,
        prompt: PromptFacts,
        worker: WorkerView,
        rates: Rates,
        usable: Sequence[WorkerView],
        fleet: FleetSnapshot,
        tokens: float,
        pull: PullPlan | None,
    ) -> Forecast:
        targets, crowd, context = self.targets, worker.crowd, prompt.num_tokens
        own, chunk = _own(prompt, worker, pull), chunk_of(worker)
        cached = context - own
        stays = max(each.residence_s for each in usable) or 1.0
        alone = rates.compute(own, chunk, crowd, cached)
        ttft = _queued(rates, worker.compute_tokens, own, worker) + alone + _seconds(pull)
        ttft += wait_for_room(_pulled(prompt, worker, pull), worker)
        joined = crowd.joined(context)
        second = rates.decodes(joined)
        damage = first_missed(ttft, targets) + behind(worker, ttft, alone, targets)
        damage += joining(rates, crowd, context, targets)
        if worker.role is D or crowd.streams:
            damage += self._mixed_in(rates, worker, (own, cached), stays)
        share = worker.prompt_share
        if worker.role is P:
            demand = Demand.of(usable, fleet.arrivals)
            demand = demand.at_least(alone, stays, max(0.0, ttft - alone))
            damage += kept_from_prompts(rates, worker, context, demand, stays, targets)
            share = max(share, demand.share)
        damage += own_gaps(rates, worker, joined, share, targets)
        answers = _answers(rates, crowd, prompt, tokens, share)
        answers += crowd.streams * rates.added(own, chunk, cached)
        cost = ttft + second + MISS * damage + ANSWER * answers + SUSPECT * worker.suspect
        cost += PREEMPTING if worker.role is D and is_full(worker) else 0.0
        name, both = worker.role.value, (worker.incarnation, None)
        return Forecast(name, *both, ttft, second, damage, cost, answers, pull)

    def _mixed_in(
        self, rates: Rates, worker: WorkerView, own: tuple[int, int], stays: float
    ) -> float:
        (tokens, before), crowd = own, worker.crowd
        chunk, some = mixed_chunk_of(worker, rates, before), max(crowd, Crowd(1))
        step = rates.decodes(some)
        allowed = max(1.0, ALLOWED_GAPS * stays / step) if step else 1.0
        hit = gap_missed(rates.step(some, min(tokens, chunk), before), self.targets)
        uneven = crowd.streams * hit * min(1.0, -(-tokens // chunk) / allowed)
        lost = rates.added(tokens, chunk, before) * (crowd.streams + 1) / stays
        return uneven + lost * (step / self.targets.itl) ** 2


def _rank(way: Forecast) -> tuple[float, bytes, bytes]:
    return way.cost, way.prefill or b"", way.worker


def _pulls(
    prompt: PromptFacts, fleet: FleetSnapshot, rates: dict[Incarnation, Rates], worker: WorkerView
) -> list[PullPlan | None]:
    """Without, and with the best pull of all that are sooner than computing."""
    plans = []
    if not prompt.whole:
        # As it reports, not as it is taught.
        (puller,) = (each for each in fleet.workers if each.incarnation == worker.incarnation)
        for holder in fleet.workers:
            link = holder.incarnation, worker.incarnation
            if link in fleet.pull_links and not holder.draining:
                pace = fleet.paces.get(link, LinkPace())
                plans.append(_plan(prompt, puller, holder, rates, pace))
    sooner = [each for each in plans if each is not None and each.seconds < each.compute_s]
    best = max(sooner, key=lambda each: (each.compute_s - each.seconds, each.holder), default=None)
    return [None] if best is None else [None, best]


def _plan(
    prompt: PromptFacts,
    worker: WorkerView,
    holder: WorkerView,
    rates: dict[Incarnation, Rates],
    pace: LinkPace,
) -> PullPlan | None:
    own, theirs = rates[worker.incarnation], rates.get(holder.incarnation)
    have, size = prompt.hits.get(worker.incarnation, 0), worker.block_size
    upto = min(prompt.hits.get(holder.incarnation, 0), (prompt.num_tokens - 1) // size * size)
    tokens, rate = upto - have, pace.bytes_per_s or pace.probed_bytes_per_s
    if tokens <= 0 or not rate or worker.fingerprint != holder.fingerprint:
        return None
    chunk, crowd = chunk_of(worker), worker.crowd
    computed = own.compute(uncached(prompt, worker), chunk, crowd, have)
    computed -= own.compute(prompt.num_tokens - upto, chunk, crowd, upto)
    turn, ahead = 0.0, min(holder.compute_tokens, chunk_of(holder))
    if theirs is not None and (ahead or holder.crowd.streams):
        turn = theirs.step(holder.crowd, ahead)
    seconds = ROUND_SECONDS + turn + pace.wait + tokens * worker.token_bytes / rate
    return PullPlan(holder.incarnation, upto, tokens, seconds, max(0.0, computed))


def _pulled(prompt: PromptFacts, worker: WorkerView, pull: PullPlan | None) -> PromptFacts:
    if pull is None:
        return prompt
    return replace(prompt, hits={**prompt.hits, worker.incarnation: pull.num_tokens})


def _own(prompt: PromptFacts, worker: WorkerView, pull: PullPlan | None) -> int:
    return uncached(_pulled(prompt, worker, pull), worker)


def _seconds(pull: PullPlan | None) -> float:
    return 0.0 if pull is None else pull.seconds


def _queued(rates: Rates, pending: int, own: int, worker: WorkerView) -> float:
    chunk, crowd, mean = chunk_of(worker), worker.crowd, worker.mean_waiting or pending
    ahead = rates.queue(pending + own, chunk, crowd, mean)
    return max(0.0, ahead - rates.queue(own, chunk, crowd, mean))


def _answers(rates: Rates, crowd: Crowd, prompt: PromptFacts, tokens: float, share: float) -> float:
    own = tokens * token_seconds(rates, crowd.joined(prompt.num_tokens), share)
    return own + lengthened(rates, crowd, prompt.num_tokens, tokens, share)
