"""What each end of a way comes to by itself, once for each worker. Pure.

A fleet has as many pairs as its prefill workers times its decode workers, but most of a pair's
forecast hangs on one of the two: on who computes the prompt (``Computing``, and ``Producing`` where
it is handed over), or on who decodes it (``Decoding``). ``forecast`` puts them together.
"""

from __future__ import annotations

from dataclasses import dataclass

from tandem.protocol.card import WorkerRole
from tandem.protocol.steps import Crowd
from tandem.router.placement.answers import lengthened, token_seconds
from tandem.router.placement.damage import (
    Demand,
    MixedSteps,
    Targets,
    behind,
    first_missed,
    joining,
    mixed_in,
    own_gaps,
)
from tandem.router.placement.load import uncached
from tandem.router.placement.pulls import PullPlan, with_pull
from tandem.router.placement.rates import Rates, chunk_of
from tandem.router.placement.room import wait_for_room
from tandem.router.placement.snapshot import PromptFacts, WorkerView

SUSPECT = 1e6
"""Seconds that a worker which fails by its own fault costs."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """What is the same for all ways of a prompt."""

    prompt: PromptFacts
    targets: Targets
    tokens: float
    """Of the answer, as many as are expected."""
    stays: float
    """Seconds that requests stay where they decode."""
    demand: Demand
    """Of the fleet."""


@dataclass(frozen=True, slots=True)
class Computing:
    """A worker that computes the prompt, behind a pull if there is one."""

    worker: WorkerView
    rates: Rates
    pull: PullPlan | None
    own: int
    """Tokens to compute."""
    alone: float
    """Seconds that they take."""
    ttft: float
    """Seconds to the first token, where the worker goes on with it."""
    mixed: MixedSteps | None
    """What it does to those beside which it is computed; None where nobody decodes, on a worker
    that is not for that."""
    slowed: float
    """Seconds by which the answers beside it take longer, together."""

    @classmethod
    def of(
        cls, outlook: Outlook, worker: WorkerView, rates: Rates, pull: PullPlan | None
    ) -> Computing:
        """From what is cached there, or will be behind the pull."""
        prompt, crowd, chunk = outlook.prompt, worker.crowd, chunk_of(worker)
        own = uncached(with_pull(prompt, worker, pull), worker)
        cached = prompt.num_tokens - own
        alone = rates.compute(own, chunk, crowd, cached)
        ahead = _queued(rates, worker, worker.compute_tokens, own)
        ttft = ahead + alone + (0.0 if pull is None else pull.seconds)
        mixed, slowed = None, 0.0
        if crowd.streams or worker.role is WorkerRole.DECODE:
            mixed = mixed_in(rates, worker, (own, cached), crowd, outlook.targets)
            slowed = crowd.streams * rates.added(own, chunk, cached)
        return cls(worker, rates, pull, own, alone, ttft, mixed, slowed)

    def behind_all(self) -> float:
        """Seconds to the first token behind what comes from others, too."""
        worker, pull = self.worker, self.pull
        if worker.pending_tokens == worker.compute_tokens:
            return self.ttft
        ahead = _queued(self.rates, worker, worker.pending_tokens, self.own)
        return ahead + self.alone + (0.0 if pull is None else pull.seconds)


@dataclass(frozen=True, slots=True)
class Producing:
    """A prefill worker's half of its pairs."""

    computing: Computing
    ttft: float
    """Seconds to the first token."""
    late: float
    """The chance that this is over the bound."""
    behind: float
    """Requests behind this one that are late for it."""
    fault: float

    @classmethod
    def of(cls, outlook: Outlook, computing: Computing) -> Producing:
        """Behind all that waits there."""
        worker, targets = computing.worker, outlook.targets
        ttft = computing.behind_all()
        late = first_missed(ttft, targets)
        kept = behind(worker, ttft, computing.alone, targets)
        return cls(computing, ttft, late, kept, fault_of(worker))


@dataclass(frozen=True, slots=True)
class Decoding:
    """A worker that decodes the answer: its half of pairs, and of doing it all."""

    worker: WorkerView
    room: float
    """Seconds until there is room for a prompt that is handed over."""
    step: float
    """Seconds of a step with this one in it."""
    joining: float
    """Requests there that miss because it joins them."""
    gaps: float
    """The chance that its own gaps are too long."""
    answers: float
    """Seconds that its answer takes, and by which those there take longer."""
    fault: float

    @classmethod
    def of(cls, outlook: Outlook, worker: WorkerView, rates: Rates, share: float) -> Decoding:
        """Where prompts take ``share`` of its time."""
        prompt, targets, crowd = outlook.prompt, outlook.targets, worker.crowd
        context = prompt.num_tokens
        joined = crowd.joined(context)
        return cls(
            worker,
            wait_for_room(prompt, worker),
            rates.decodes(joined),
            joining(rates, crowd, context, targets),
            own_gaps(rates, worker, joined, share, targets),
            _answers(rates, crowd, outlook, share),
            fault_of(worker),
        )


def fault_of(worker: WorkerView) -> float:
    """Seconds that its faults are worth."""
    return SUSPECT if worker.suspect else 0.0


def _queued(rates: Rates, worker: WorkerView, pending: int, own: int) -> float:
    """Seconds for what waits before a prompt of ``own`` tokens, whose first step it shares."""
    chunk, crowd, mean = chunk_of(worker), worker.crowd, worker.mean_waiting or pending
    ahead = rates.queue(pending + own, chunk, crowd, mean)
    return max(0.0, ahead - rates.queue(own, chunk, crowd, mean))


def _answers(rates: Rates, crowd: Crowd, outlook: Outlook, share: float) -> float:
    context, tokens = outlook.prompt.num_tokens, outlook.tokens
    own = tokens * token_seconds(rates, crowd.joined(context), share)
    return own + lengthened(rates, crowd, context, tokens, share)
