"""What each way would come to for one prompt, in seconds, from rates that were measured. Pure.

Three ways: a prefill worker hands over to a decode worker (``pair``), a decode worker computes the
prompt beside what it decodes (``decode``), a prefill worker goes on with what it computed
(``prefill``). Each has a time to the first token, one more to the second, and a number of requests
that miss their bounds for it, this one among them (``damage``). One cost in seconds puts them
together. No length of a prompt is treated by itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tandem.protocol.ids import Incarnation
from tandem.protocol.steps import Crowd
from tandem.router.placement.answers import lengthened, token_seconds
from tandem.router.placement.damage import (
    Demand,
    Targets,
    behind,
    first_missed,
    joining,
    kept_from_prompts,
    mixed_in,
    own_gaps,
)
from tandem.router.placement.load import is_full, uncached
from tandem.router.placement.pulls import PullPlan, with_pull
from tandem.router.placement.rates import Rates, chunk_of
from tandem.router.placement.snapshot import LinkPace, PromptFacts, WorkerView

UNKNOWN_TAIL = 0.02
"""Seconds between the first token and the second over a link that has not been used."""
UNKNOWN_RESIDENCE = 1.0
"""Seconds that a request is taken to hold its blocks before one has ended."""
MISS = 1.0
"""Seconds of waiting that a request outside its bounds is worth."""
ANSWER = 0.1
"""Seconds of waiting for a first token that a second of a longer answer is worth."""
SUSPECT = 1e6
"""Seconds that a worker which fails by its own fault costs."""
SPREADS = 2.0
"""Mean differences above its mean for which a second token is still waited for."""
HELD_SHARE = 0.8
"""Of the bound of first tokens, how late one may be that is held back."""
PREEMPTING = 1e3
"""Seconds for computing a prompt on a decode worker that is about to preempt others for it."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """One way, and what it would come to; in seconds where nothing else is said."""

    way: str
    """pair, decode or prefill: who computes, and who goes on."""
    worker: Incarnation
    prefill: Incarnation | None
    ttft: float
    """To the first token."""
    second: float
    """From the first token to the second."""
    damage: float
    """Requests that miss their bounds for it, this one among them."""
    cost: float
    answers: float = 0.0
    """That the answer takes, and by which those beside it take longer."""
    pull: PullPlan | None = None
    """What who computes the prompt pulls from a peer first."""
    hold: float = 0.0
    """By which the first token is held back at the router, unless the second is there before."""
    hold_until: float = math.inf
    """Seconds from when it was sent beyond which no first token is held back."""

    def __str__(self) -> str:
        names = [each.hex()[:8] for each in (self.prefill, self.worker) if each is not None]
        pulls = "" if self.pull is None else f" {self.pull}:"
        held = f" and held back for up to {self.hold * 1e3:.0f}" if self.hold else ""
        return (
            f"{self.way} {'>'.join(names)}:{pulls} first token {self.ttft * 1e3:.0f} ms{held}, "
            f"second {self.second * 1e3:.0f} ms later, answers {self.answers:.2f} s, "
            f"{self.damage:.2f} requests miss, "
            f"cost {self.cost * 1e3:.0f} ms"
        )


def forecast_pair(
    prompt: PromptFacts,
    producer: WorkerView,
    consumer: WorkerView,
    pace: LinkPace,
    rates: tuple[Rates, Rates],
    targets: Targets,
    *,
    tokens: float = 0.0,
    pull: PullPlan | None = None,
) -> Forecast:
    """Prefill there, hand over, decode here; behind a pull, if there is one. ``tokens``: of the
    answer, as many as are expected."""
    fast, slow = rates
    prompt = with_pull(prompt, producer, pull)
    own = uncached(prompt, producer)
    cached = prompt.num_tokens - own
    chunk, crowd = chunk_of(producer), producer.crowd
    alone = fast.compute(own, chunk, crowd, cached)
    ttft = _queued(fast, producer.pending_tokens, own, producer) + alone + _pulled(pull)
    joined = consumer.crowd.joined(prompt.num_tokens)
    second = pace.tail_s if pace.tail_s is not None else UNKNOWN_TAIL
    step = slow.decodes(joined)
    second += pace.wait + step
    second += wait_for_room(prompt, consumer)
    damage = first_missed(ttft, targets) + first_missed(second, targets)
    damage += behind(producer, ttft, alone, targets)
    damage += joining(slow, consumer.crowd, prompt.num_tokens, targets)
    damage += own_gaps(slow, consumer, joined, consumer.prompt_share, targets)
    if crowd.streams:
        stays = stay_of(producer, consumer)
        damage += mixed_in(fast, producer, (own, cached), crowd, stays, targets)
    answers = _answers(slow, consumer.crowd, prompt, tokens, consumer.prompt_share)
    answers += crowd.streams * fast.added(own, chunk, cached)
    cost = ttft + second + MISS * damage + ANSWER * answers
    cost += _fault(producer) + _fault(consumer)
    both = consumer.incarnation, producer.incarnation
    hold = held_back(pace, step, ttft, targets)
    until = HELD_SHARE * targets.ttft
    return Forecast("pair", *both, ttft, second, damage, cost, answers, pull, hold, until)


def forecast_whole(
    prompt: PromptFacts,
    worker: WorkerView,
    rates: Rates,
    targets: Targets,
    *,
    way: str,
    stays: float | None = None,
    demand: Demand | None = None,
    tokens: float = 0.0,
    pull: PullPlan | None = None,
) -> Forecast:
    """All of it on one worker, its prompt in chunks beside what it decodes. ``stays``: seconds
    that requests stay where they decode, if this worker cannot tell; ``demand``: of the fleet;
    ``tokens``: of the answer, as many as are expected; ``pull``: what comes from a peer first."""
    prompt = with_pull(prompt, worker, pull)
    own, crowd, context = uncached(prompt, worker), worker.crowd, prompt.num_tokens
    cached, chunk = context - own, chunk_of(worker)
    stays = stays or stay_of(worker)
    alone = rates.compute(own, chunk, crowd, cached)
    ttft = _queued(rates, worker.compute_tokens, own, worker) + alone + _pulled(pull)
    ttft += wait_for_room(prompt, worker)
    joined = crowd.joined(context)
    second = rates.decodes(joined)
    damage = first_missed(ttft, targets) + behind(worker, ttft, alone, targets)
    damage += joining(rates, crowd, context, targets)
    if way == "decode" or crowd.streams:
        damage += mixed_in(rates, worker, (own, cached), crowd, stays, targets)
    share = worker.prompt_share
    if way == "prefill":
        demand = (demand or Demand()).at_least(alone, stays, max(0.0, ttft - alone))
        damage += kept_from_prompts(rates, worker, context, demand, stays, targets)
        share = max(share, demand.share)
    damage += own_gaps(rates, worker, joined, share, targets)
    answers = _answers(rates, crowd, prompt, tokens, share)
    answers += crowd.streams * rates.added(own, chunk, cached)
    cost = ttft + second + MISS * damage + ANSWER * answers + _fault(worker)
    cost += PREEMPTING if way == "decode" and is_full(worker) else 0.0
    return Forecast(way, worker.incarnation, None, ttft, second, damage, cost, answers, pull)


def held_back(pace: LinkPace, step: float, ttft: float, targets: Targets) -> float:
    """Seconds for which a first token is kept for the second to follow within the bound of gaps:
    by how much it mostly comes later than that, a ``step`` behind the decode worker's first word,
    which repeats the first, as the tails of the link's last hand-offs say. No more than the bound
    itself, and never so much that the first would be late."""
    if pace.tail_s is None:
        return 0.0
    late = pace.tail_s + SPREADS * pace.tail_spread_s + step - targets.itl
    return max(0.0, min(late, targets.itl, HELD_SHARE * targets.ttft - ttft))


def stay_of(*workers: WorkerView) -> float:
    """Seconds that a request stays where it decodes, by the worker where they stay longest: a
    prefill worker's mostly leave at once."""
    return max(each.residence_s for each in workers) or UNKNOWN_RESIDENCE


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


def can_hold(prompt: PromptFacts, worker: WorkerView) -> bool:
    """Whether the prompt and a token would fit if nothing else were there."""
    if not worker.total_blocks:
        return True
    return prompt.num_tokens < worker.total_blocks * worker.block_size


def _queued(rates: Rates, pending: int, own: int, worker: WorkerView) -> float:
    """Seconds for what waits before a prompt of ``own`` tokens, whose first step it shares."""
    chunk, crowd, mean = chunk_of(worker), worker.crowd, worker.mean_waiting or pending
    ahead = rates.queue(pending + own, chunk, crowd, mean)
    return max(0.0, ahead - rates.queue(own, chunk, crowd, mean))


def _answers(rates: Rates, crowd: Crowd, prompt: PromptFacts, tokens: float, share: float) -> float:
    own = tokens * token_seconds(rates, crowd.joined(prompt.num_tokens), share)
    return own + lengthened(rates, crowd, prompt.num_tokens, tokens, share)


def _pulled(pull: PullPlan | None) -> float:
    return 0.0 if pull is None else pull.seconds


def _fault(worker: WorkerView) -> float:
    return SUSPECT if worker.suspect else 0.0
