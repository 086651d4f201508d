"""Predicted cost of each way to serve a prompt, in seconds, from measured times.

The ways are a hand-off (``pair``), all on a decode worker (``decode``), or all on a prefill worker
(``prefill``). docs/decisions/placement-by-cost.md defines the cost. Most of it depends on one end,
so it is computed per worker: ``Prefilling`` and ``Decoding``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from tandem.protocol.card import WorkerRole
from tandem.protocol.ids import Incarnation
from tandem.protocol.messages import DecodeBatch
from tandem.router.placement.rates import MOST_BUSY, Rates, chunk_of
from tandem.router.placement.snapshot import (
    UNKNOWN_RESIDENCE,
    UNUSED,
    FleetSnapshot,
    LinkThroughput,
    PromptFacts,
    WorkerView,
    is_full,
    uncached,
    wait_for_room,
)

ROUND_SECONDS = 0.003
"""Seconds of a pull's request, reply, and reservation of blocks."""
BUDGET_SECONDS = (0.05, 10.0)
"""Minimum and maximum seconds of a pull."""


@dataclass(frozen=True, slots=True)
class PullPlan:
    """Pull of cached tokens, and its predicted times."""

    holder: Incarnation
    num_tokens: int
    """Cached tokens of the worker after the pull."""
    tokens: int
    """Tokens sent over the link."""
    seconds: float
    """Seconds to receive them."""
    compute_s: float
    """Seconds to compute them."""

    @property
    def budget_s(self) -> float:
        """Return the seconds after which the tokens are computed instead."""
        least, most = BUDGET_SECONDS
        return min(max(self.compute_s, least), most)

    def __str__(self) -> str:
        return (
            f"pulls {self.tokens} tokens from {self.holder.hex()[:8]} in "
            f"{self.seconds * 1e3:.0f} ms, computing them {self.compute_s * 1e3:.0f} ms"
        )


def with_pull(prompt: PromptFacts, worker: WorkerView, plan: PullPlan | None) -> PromptFacts:
    """Return the prompt with the worker's cached tokens after the pull."""
    if plan is None:
        return prompt
    return replace(prompt, hits={**prompt.hits, worker.incarnation: plan.num_tokens})


def best_pulls(
    prompt: PromptFacts, fleet: FleetSnapshot, rates: Mapping[Incarnation, Rates]
) -> dict[Incarnation, PullPlan]:
    """Return the pull that saves each worker the most time, if any saves time."""
    if not (prompt.hits and fleet.pull_links) or prompt.whole:
        return {}
    views = {each.incarnation: each for each in fleet.workers}
    found: dict[Incarnation, PullPlan] = {}
    for pair in fleet.pull_links:
        holder, puller = (views.get(each) for each in pair)
        if holder is None or puller is None or puller.incarnation not in rates or holder.draining:
            continue
        throughput = fleet.paces.get(pair, UNUSED)
        plan = _plan(prompt, puller, holder, rates, throughput)
        if plan is None or plan.seconds >= plan.compute_s:
            continue
        best = found.get(puller.incarnation)
        if best is None or _gain(plan) > _gain(best):
            found[puller.incarnation] = plan
    return found


def _gain(plan: PullPlan) -> tuple[float, Incarnation]:
    return plan.compute_s - plan.seconds, plan.holder


def _plan(
    prompt: PromptFacts,
    puller: WorkerView,
    holder: WorkerView,
    rates: Mapping[Incarnation, Rates],
    throughput: LinkThroughput,
) -> PullPlan | None:
    own, size = rates[puller.incarnation], puller.block_size
    have = prompt.hits.get(puller.incarnation, 0)
    upto = min(prompt.hits.get(holder.incarnation, 0), (prompt.num_tokens - 1) // size * size)
    tokens, rate = upto - have, throughput.bytes_per_s or throughput.probed_bytes_per_s
    if tokens <= 0 or not rate or puller.fingerprint != holder.fingerprint:
        return None
    chunk, decode_batch = chunk_of(puller), puller.decode_batch
    alone = own.compute(uncached(prompt, puller), chunk, decode_batch, have)
    rest = own.compute(prompt.num_tokens - upto, chunk, decode_batch, upto)
    step = _current_step(holder, rates.get(holder.incarnation))
    seconds = ROUND_SECONDS + step + throughput.wait + tokens * puller.token_bytes / rate
    return PullPlan(holder.incarnation, upto, tokens, seconds, max(0.0, alone - rest))


def _current_step(holder: WorkerView, rates: Rates | None) -> float:
    """Return the seconds of the holder's current step."""
    prompts = min(holder.compute_tokens, chunk_of(holder))
    if rates is None or not (prompts or holder.decode_batch.streams):
        return 0.0
    return rates.step(holder.decode_batch, prompts)


HANDOFF_SECONDS, HANDOFF_STEPS = 0.003, 3
"""Seconds of a hand-off's messages, and the decode worker's steps to the second token."""
MISS = 1.0
"""Cost of a request outside its targets, in seconds of waiting."""
ANSWER = 0.1
"""Cost of a second of the answer, in seconds of waiting for a first token."""
SUSPECT = 1e6
"""Cost of a worker that failed by its own fault."""
PREEMPTING = 1e3
"""Cost of a prompt on a decode worker that would preempt for it."""
FIRST_SHARPNESS, GAP_SHARPNESS = 6.0, 40.0
"""Steepness of the chance to miss around a target.

A first token depends on a queue, a gap on a step's time.
"""
ALLOWED_GAPS = 0.01
"""Allowed share of gaps over the target."""
MOST_SHARE = 0.98
"""Maximum assumed share of prompts in a worker's time, so that a queue has a mean."""


@dataclass(frozen=True, slots=True)
class Targets:
    """Targets of the first token and of gaps, in seconds."""

    ttft: float
    itl: float


class Forecast(NamedTuple):
    """One way and its predicted times, in seconds. A tuple, which is cheaper to make."""

    cost: float
    num_requests: int
    """Requests at its workers: the fewest win among equal costs."""
    worker: Incarnation
    prefill: Incarnation | None
    way: str
    """pair, decode or prefill."""
    ttft: float
    """Seconds to the first token."""
    second: float
    """Seconds from the first token to the second."""
    missing: float
    """Requests that miss their targets, this one included."""
    answers: float
    """Seconds of its answer, and seconds that it adds to other answers."""
    pull: PullPlan | None = None
    """Pull of the prefilling worker before it."""

    def __str__(self) -> str:
        names = [each.hex()[:8] for each in (self.prefill, self.worker) if each is not None]
        pulls = "" if self.pull is None else f" {self.pull}:"
        return (
            f"{self.way} {'>'.join(names)}:{pulls} first token {self.ttft * 1e3:.0f} ms, "
            f"second {self.second * 1e3:.0f} ms later, answers {self.answers:.2f} s, "
            f"{self.missing:.2f} requests miss, cost {self.cost * 1e3:.0f} ms"
        )


def miss_chance(seconds: float, target: float, sharpness: float) -> float:
    """Return the chance that a predicted time is over its target: one half at the target."""
    below: float = min(target / seconds, 1e6) ** sharpness if seconds > 0 else 1e6
    return 1.0 / (1.0 + below)


@dataclass(frozen=True, slots=True)
class Outlook:
    """Values that all ways of a prompt share."""

    prompt: PromptFacts
    targets: Targets
    tokens: float
    """Expected tokens of the answer."""
    stays: float
    """Seconds that requests stay at their decoding worker."""
    arrivals: tuple[float, float]
    """Prompts per second and share of time at each prefill worker, if it got all prompts."""

    @classmethod
    def of(
        cls,
        prompt: PromptFacts,
        targets: Targets,
        fleet: FleetSnapshot,
        usable: Sequence[WorkerView],
        rates: Mapping[Incarnation, Rates],
    ) -> Outlook:
        """Measure the usable workers."""
        longest = max(usable, key=lambda each: each.residence_s)
        token = rates[longest.incarnation].token(
            max(longest.decode_batch, DecodeBatch(1)), longest.prompt_share
        )
        tokens = longest.residence_s / token
        if prompt.max_new_tokens is not None:
            tokens = min(tokens, float(prompt.max_new_tokens))
        stays = longest.residence_s or UNKNOWN_RESIDENCE
        return cls(prompt, targets, tokens, stays, _arrivals(fleet, usable, rates))


@dataclass(frozen=True, slots=True)
class Prefilling:
    """Worker that computes the prompt, possibly after a pull."""

    worker: WorkerView
    rates: Rates
    pull: PullPlan | None
    alone: float
    """Seconds to compute it."""
    ttft: float
    """Seconds to the first token."""
    mixed: float
    """Requests that miss because of its mixed steps."""
    slowed: float
    """Seconds by which it lengthens concurrent answers, in total."""
    last_chunk: int
    """Tokens of its last chunk, whose KV is sent after them."""

    @classmethod
    def of(
        cls, outlook: Outlook, worker: WorkerView, rates: Rates, pull: PullPlan | None = None
    ) -> Prefilling:
        """Predict the times from the worker's queue and its cache after the pull."""
        prompt, decode_batch, chunk = (
            with_pull(outlook.prompt, worker, pull),
            worker.decode_batch,
            chunk_of(worker),
        )
        own = uncached(prompt, worker)
        cached = prompt.num_tokens - own
        alone = rates.compute(own, chunk, decode_batch, cached)
        prefills = worker.role is WorkerRole.PREFILL
        pending = worker.pending_tokens if prefills else worker.compute_tokens
        ttft = rates.queue(worker, pending, own) + alone + (0.0 if pull is None else pull.seconds)
        mixed = slowed = 0.0
        if decode_batch.streams:
            mixed = _mixed(outlook, worker, rates, own, cached)
            slowed = decode_batch.streams * rates.added(own, chunk, cached)
        return cls(worker, rates, pull, alone, ttft, mixed, slowed, min(own, chunk))

    def late(self, ttft: float, targets: Targets) -> float:
        """Return the requests whose first token is late if this one's takes ``ttft`` seconds.

        They are itself and those that come while the busy period is longer.
        """
        busy = self.alone / (1.0 - min(MOST_BUSY, self.worker.prompt_share))
        after = self.worker.prompts_per_s * busy
        return miss_chance(ttft, targets.ttft, FIRST_SHARPNESS) + after * miss_chance(
            ttft + self.alone / 2, targets.ttft, FIRST_SHARPNESS
        )


@dataclass(frozen=True, slots=True)
class Decoding:
    """Worker that decodes the answer."""

    worker: WorkerView
    step: float
    """Seconds of a step with this request."""
    answers: float
    """Seconds of its answer, and seconds that it adds to other answers."""
    room: float
    """Seconds until there is room for the hand-off."""
    gaps: float
    """Chance that its own gaps are over the target."""
    fault: float

    @classmethod
    def of(cls, outlook: Outlook, worker: WorkerView, rates: Rates, share: float) -> Decoding:
        """Predict the times if prompts take ``share`` of the worker's time."""
        decode_batch = worker.decode_batch
        joined = decode_batch.joined(outlook.prompt.num_tokens)
        after = rates.token(joined, share)
        longer = max(0.0, after - rates.token(decode_batch, share)) if decode_batch.streams else 0.0
        answers = outlook.tokens * (after + decode_batch.streams * longer)
        room, step = wait_for_room(outlook.prompt, worker), rates.decodes(joined)
        mixed = rates.step(joined, rates.mixed_chunk(worker))
        itl, often = outlook.targets.itl, min(1.0, share / ALLOWED_GAPS)
        gaps = max(
            miss_chance(step, itl, GAP_SHARPNESS), often * miss_chance(mixed, itl, GAP_SHARPNESS)
        )
        return cls(worker, step, answers, room, gaps, fault_of(worker))


def forecast_pair(
    outlook: Outlook, prefilling: Prefilling, decoding: Decoding, throughput: LinkThroughput
) -> Forecast:
    """Predict a hand-off."""
    producer, consumer, targets = prefilling.worker, decoding.worker, outlook.targets
    second = HANDOFF_SECONDS + throughput.wait + HANDOFF_STEPS * decoding.step
    if throughput.bytes_per_s:
        tokens, token = (
            uncached(outlook.prompt, consumer),
            producer.token_bytes / throughput.bytes_per_s,
        )
        last = min(tokens, prefilling.last_chunk) * token
        second += max(last, tokens * token - prefilling.alone)  # the rest is sent meanwhile
    second += decoding.room
    missing = prefilling.mixed + prefilling.late(prefilling.ttft, targets)
    missing += miss_chance(second, targets.ttft, FIRST_SHARPNESS) + decoding.gaps
    answers = decoding.answers + prefilling.slowed
    cost = prefilling.ttft + second + MISS * missing + ANSWER * answers
    cost += fault_of(producer) + decoding.fault
    others = producer.num_requests + consumer.num_requests
    ends = consumer.incarnation, producer.incarnation
    return Forecast(
        cost, others, *ends, "pair", prefilling.ttft, second, missing, answers, prefilling.pull
    )


def forecast_decode(outlook: Outlook, prefilling: Prefilling, decoding: Decoding) -> Forecast:
    """Predict a decode worker: the prompt in chunks, together with decodes."""
    full = PREEMPTING if is_full(decoding.worker) else 0.0
    return _whole("decode", outlook, prefilling, decoding, full)


def forecast_prefill(outlook: Outlook, prefilling: Prefilling) -> Forecast:
    """Predict a prefill worker, which computes fewer prompts while it decodes."""
    worker, stays = prefilling.worker, outlook.stays
    prompts, share = outlook.arrivals
    prompts, share = max(prompts, 1.0 / stays), max(share, prefilling.alone / stays)
    decoding = Decoding.of(outlook, worker, prefilling.rates, max(worker.prompt_share, share))
    late = _kept_waiting(outlook, prefilling, prompts, share)
    return _whole("prefill", outlook, prefilling, decoding, MISS * late)


def forecast_prompt(outlook: Outlook, prefilling: Prefilling) -> Forecast:
    """Predict a request that ends with its prompt or its first token."""
    worker, ttft = prefilling.worker, prefilling.ttft
    missing = prefilling.mixed + prefilling.late(ttft, outlook.targets)
    full = PREEMPTING if worker.role is WorkerRole.DECODE and is_full(worker) else 0.0
    cost = ttft + MISS * missing + ANSWER * prefilling.slowed + full + fault_of(worker)
    return Forecast(
        *(cost, worker.num_requests, worker.incarnation, None, str(worker.role)),
        *(ttft, 0.0, missing, prefilling.slowed, prefilling.pull),
    )


def fault_of(worker: WorkerView) -> float:
    """Return the cost of the worker's faults."""
    return SUSPECT if worker.suspect else 0.0


def _whole(
    way: str, outlook: Outlook, prefilling: Prefilling, decoding: Decoding, more: float
) -> Forecast:
    worker = prefilling.worker
    prompt = with_pull(outlook.prompt, worker, prefilling.pull)
    ttft = prefilling.ttft + wait_for_room(prompt, worker)
    missing = prefilling.mixed + prefilling.late(ttft, outlook.targets) + decoding.gaps
    answers = decoding.answers + prefilling.slowed
    cost = ttft + decoding.step + MISS * missing + ANSWER * answers + decoding.fault + more
    return Forecast(
        *(cost, worker.num_requests, worker.incarnation, None, way),
        *(ttft, decoding.step, missing, answers, prefilling.pull),
    )


def _arrivals(
    fleet: FleetSnapshot, workers: Sequence[WorkerView], rates: Mapping[Incarnation, Rates]
) -> tuple[float, float]:
    """Return prompts per second and share of time for each prefill worker.

    The router's own count is used if it is higher than the reports.
    """
    prefill = [each for each in workers if each.role is WorkerRole.PREFILL]
    if not prefill:
        return 0.0, 0.0
    most, seconds = rates[prefill[0].incarnation].prompt[-1]
    prompts = max(sum(each.prompts_per_s for each in workers), fleet.arrivals.prompts_per_s)
    share = sum(each.prompt_share for each in workers)
    share = max(share, fleet.arrivals.tokens_per_s * seconds / most)
    return prompts / len(prefill), share / len(prefill)


def _mixed(outlook: Outlook, worker: WorkerView, rates: Rates, own: int, cached: int) -> float:
    """Return concurrent requests with too many gaps over the target because of the prompt's
    chunks.
    """
    decode_batch, targets = worker.decode_batch, outlook.targets
    chunk = rates.mixed_chunk(worker, cached)
    step = rates.step(decode_batch, min(own, chunk), cached)
    allowed = max(1.0, ALLOWED_GAPS * outlook.stays / rates.decodes(decode_batch))
    uneven = min(1.0, -(-own // chunk) / allowed)
    return decode_batch.streams * miss_chance(step, targets.itl, GAP_SHARPNESS) * uneven


def _kept_waiting(outlook: Outlook, prefilling: Prefilling, prompts: float, share: float) -> float:
    """Return requests with a late first token because a prefill worker decodes this one.

    Its prompts get slower in mixed steps, so the mean wait (M/D/1) grows. ``prompts`` and ``share``
    are the whole fleet's.
    """
    worker, rates, stays = prefilling.worker, prefilling.rates, outlook.stays
    mixed = rates.mixed_chunk(worker)
    most, seconds = rates.prompt[-1]
    with_decodes = rates.step(worker.decode_batch.joined(outlook.prompt.num_tokens), mixed) / mixed
    slower = max(1.0, with_decodes * most / seconds)
    needed = share + max(0.0, prefilling.ttft - prefilling.alone) / stays
    service = share / prompts

    def late(times: float) -> tuple[float, float]:
        beyond = max(0.0, 1.0 - 1.0 / (needed * times))
        busy = min(MOST_SHARE, needed * times)
        mean = service * times * (1.0 + busy / (2.0 * (1.0 - busy)))
        return max(miss_chance(mean, outlook.targets.ttft, FIRST_SHARPNESS), beyond), beyond

    (before, never_before), (after, never_after) = late(1.0), late(slower)
    return prompts * stays * max(after - before, never_after - never_before)
