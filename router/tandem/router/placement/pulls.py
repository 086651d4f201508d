"""Whether a worker should pull a prompt's start from a peer that has it cached, by forecast. Pure.

Computing the tokens takes what the worker's own steps took; pulling them, what their bytes take
over the link at its measured pace, behind what waits there, and until the holder's loop comes
round: a holder in the middle of a prompt answers after its step. Both are candidates of placement,
with all that follows from a shorter or longer stay; nothing goes by a length.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tandem.protocol.ids import Incarnation
from tandem.protocol.steps import Crowd
from tandem.router.placement.load import uncached
from tandem.router.placement.rates import Rates, chunk_of
from tandem.router.placement.snapshot import (
    UNUSED,
    FleetSnapshot,
    LinkPace,
    PromptFacts,
    WorkerView,
)

ROUND_SECONDS = 0.003
"""Question and answer, and the puller's own turns until blocks are reserved and used."""
BUDGET_SECONDS = (0.05, 10.0)
"""Least and most of what a pull may take before its tokens are computed."""


@dataclass(frozen=True, slots=True)
class PullPlan:
    """One pull, and what it is expected to come to."""

    holder: Incarnation
    num_tokens: int
    """Tokens of the prompt's start that the worker has afterwards."""
    tokens: int
    """Of them, those that come over the link."""
    seconds: float
    """Until they are there."""
    compute_s: float
    """What computing them there would take instead."""

    @property
    def budget_s(self) -> float:
        """When a pull has lost: after the time that computing would have taken."""
        least, most = BUDGET_SECONDS
        return min(max(self.compute_s, least), most)

    def __str__(self) -> str:
        return (
            f"pulls {self.tokens} tokens from {self.holder.hex()[:8]} in "
            f"{self.seconds * 1e3:.0f} ms, computing them {self.compute_s * 1e3:.0f} ms"
        )


def with_pull(prompt: PromptFacts, worker: WorkerView, plan: PullPlan | None) -> PromptFacts:
    """The prompt as the worker finds it behind a pull."""
    if plan is None:
        return prompt
    return replace(prompt, hits={**prompt.hits, worker.incarnation: plan.num_tokens})


def best_pulls(
    prompt: PromptFacts, fleet: FleetSnapshot, rates: Mapping[Incarnation, Rates | None]
) -> dict[Incarnation, PullPlan]:
    """The soonest pull of each worker that has a link to a holder of more, if that is sooner than
    computing what it brings."""
    if not (prompt.hits and fleet.pull_links) or prompt.whole:
        return {}
    views = {each.incarnation: each for each in fleet.workers}
    turns = {
        each: _turn(views[each], rates.get(each))
        for each in prompt.hits
        if each in views and not views[each].draining  # who drains lends nothing
    }
    holders: dict[Incarnation, list[Incarnation]] = {}
    for holder, puller in fleet.pull_links:
        if holder in turns and prompt.hits[holder] > prompt.hits.get(puller, 0):
            holders.setdefault(puller, []).append(holder)
    found: dict[Incarnation, PullPlan] = {}
    for puller, able in holders.items():
        worker, own = views.get(puller), rates.get(puller)
        if worker is None or own is None:
            continue
        end = _Puller.of(prompt, worker, own)
        paced = ((each, fleet.paces.get((each, puller), UNUSED)) for each in able)
        plans = [_plan(prompt, end, views[each], turns[each], pace) for each, pace in paced]
        sooner = [each for each in plans if each is not None and each.seconds < each.compute_s]
        if sooner:
            found[puller] = max(sooner, key=_gain)
    return found


@dataclass(frozen=True, slots=True)
class _Puller:
    """Who pulls: what is the same whoever lends."""

    worker: WorkerView
    rates: Rates
    crowd: Crowd
    have: int
    """Tokens of the prompt that it has cached."""
    alone: float
    """Seconds in which it would compute the others."""

    @classmethod
    def of(cls, prompt: PromptFacts, worker: WorkerView, rates: Rates) -> _Puller:
        have, crowd = prompt.hits.get(worker.incarnation, 0), worker.crowd
        alone = rates.compute(uncached(prompt, worker), chunk_of(worker), crowd, have)
        return cls(worker, rates, crowd, have, alone)


def _gain(plan: PullPlan) -> tuple[float, Incarnation]:
    return plan.compute_s - plan.seconds, plan.holder


def _plan(
    prompt: PromptFacts, end: _Puller, holder: WorkerView, turn: float, pace: LinkPace
) -> PullPlan | None:
    """``turn``: seconds until the holder answers."""
    worker, size = end.worker, end.worker.block_size
    upto = min(prompt.hits[holder.incarnation], (prompt.num_tokens - 1) // size * size)
    tokens, rate = upto - end.have, pace.bytes_per_s or pace.probed_bytes_per_s
    if tokens <= 0 or not rate or worker.fingerprint != holder.fingerprint:
        return None
    rest = end.rates.compute(prompt.num_tokens - upto, chunk_of(worker), end.crowd, upto)
    seconds = ROUND_SECONDS + turn + pace.wait + tokens * worker.token_bytes / rate
    return PullPlan(holder.incarnation, upto, tokens, seconds, max(0.0, end.alone - rest))


def _turn(holder: WorkerView, rates: Rates | None) -> float:
    """Seconds of the step that the holder is in, at most, when it is asked."""
    if rates is None:
        return 0.0
    prompts = min(holder.compute_tokens, chunk_of(holder))
    if not (prompts or holder.crowd.streams):
        return 0.0
    return rates.step(holder.crowd, prompts)
