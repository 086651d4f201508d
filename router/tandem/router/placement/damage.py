"""What one prompt's way makes others miss: how many requests, each term from measured times. Pure.

A request is served well if its first token and its gaps are within their bounds. A forecast is not
exact, so it misses a bound by a chance, which rises from 0 to 1 around it. What slows a worker
down makes those miss who come later: by how much follows from how many come there a second, as it
measured, and from how near to its bounds it works already.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.protocol.card import WorkerRole
from tandem.protocol.steps import Crowd
from tandem.router.placement.rates import Rates, mixed_chunk_of
from tandem.router.placement.snapshot import Arrivals, WorkerView

FIRST_SHARPNESS = 6.0
"""How steeply the chance to miss rises for a first token, whose forecast hangs on what waits."""
GAP_SHARPNESS = 40.0
"""And for a gap, which is a step of a size that was measured: some percent."""
ALLOWED_GAPS = 0.01
"""Of a request's gaps, those that may be over the bound."""
NO_ARRIVALS = Arrivals()
MOST_BUSY = 0.9
"""Of its time, what prompts are taken to need where a busy period is priced: beyond it, how long
that lasts hangs on how long the load does."""
MOST_SHARE = 0.98
"""Of a worker's time, what prompts are taken to need at most: beyond it a queue has no mean."""


@dataclass(frozen=True, slots=True)
class Targets:
    """What clients are to see: bounds of the first token and of gaps, in seconds."""

    ttft: float
    itl: float


@dataclass(frozen=True, slots=True)
class Demand:
    """What comes for each prefill worker, if all prompts of the fleet went to them alone."""

    prompts_per_s: float = 0.0
    share: float = 0.0
    """Of its time, what they would take."""
    queued: float = 0.0
    """Of its time, what waits there now takes while a request stays."""

    @classmethod
    def of(cls, workers: Sequence[WorkerView], arrivals: Arrivals = NO_ARRIVALS) -> Demand:
        """From what all workers compute, or from what this router was asked for if that is more:
        reports are behind when a load begins. Nothing where nobody has the role."""
        prefill = [each for each in workers if each.role is WorkerRole.PREFILL]
        many = len(prefill)
        if not many:
            return cls()
        steps = next((each.prompt_steps for each in (*prefill, *workers) if each.prompt_steps), ())
        most, seconds = steps[-1] if steps else (1, 0.0)
        rate = max(sum(each.prompts_per_s for each in workers), arrivals.prompts_per_s)
        share = sum(each.prompt_share for each in workers)
        share = max(share, arrivals.tokens_per_s * seconds / most)
        return cls(rate / many, share / many)

    def at_least(self, own: float, stays: float, waits: float = 0.0) -> Demand:
        """One prompt of ``own`` seconds comes while a request stays, whatever was measured, and
        what ``waits`` so many seconds there has to be computed meanwhile."""
        rate, share = max(self.prompts_per_s, 1.0 / stays), max(self.share, own / stays)
        return Demand(rate, share, waits / stays)


def missing(seconds: float, bound: float, sharpness: float) -> float:
    """The chance that what was forecast to take ``seconds`` is over ``bound``: a half at the bound
    itself, nearly 0 well below it, 1 far beyond."""
    if seconds <= 0:
        return 0.0
    below: float = min(bound / seconds, 1e6) ** sharpness
    return 1.0 / (1.0 + below)


def first_missed(seconds: float, targets: Targets) -> float:
    """The chance that a first token is late."""
    return missing(seconds, targets.ttft, FIRST_SHARPNESS)


def gap_missed(seconds: float, targets: Targets) -> float:
    """The chance that a gap of a step of ``seconds`` is too long."""
    return missing(seconds, targets.itl, GAP_SHARPNESS)


def behind(worker: WorkerView, ttft: float, own: float, targets: Targets) -> float:
    """Requests that are late for this prompt: its ``own`` seconds keep the worker busy for so much
    longer, and as those that come meanwhile are computed, too, for ``own / (1 - share)`` in all
    (a busy period); who comes in that time is late as surely as this one is, half of it counted.
    A queue that is beyond the bound already is no excuse to make it longer."""
    busy = own / (1.0 - min(MOST_BUSY, worker.prompt_share))
    return worker.prompts_per_s * busy * first_missed(ttft + own / 2, targets)


@dataclass(frozen=True, slots=True)
class MixedSteps:
    """The steps in which a prompt is computed beside decodes, whoever goes on with it."""

    over: float
    """Streams there, by the chance that a step is over the bound."""
    steps: int
    step: float
    """Seconds of one without the prompt."""
    lost: float
    """Seconds that streams lose, together."""
    near: float
    """How near to the bound steps are, as a weight of what is lost."""

    def missed(self, stays: float) -> float:
        """Requests that miss for it, where they stay ``stays`` seconds."""
        allowed = max(1.0, ALLOWED_GAPS * stays / self.step) if self.step else 1.0
        uneven = self.over * min(1.0, self.steps / allowed)
        return uneven + self.lost / stays * self.near


def mixed_in(
    rates: Rates, worker: WorkerView, own: tuple[int, int], crowd: Crowd, targets: Targets
) -> MixedSteps:
    """A prompt that is computed beside ``crowd`` on ``worker``, and whom it makes miss. ``own``:
    its tokens to compute, and those before them.

    Those that decode see gaps of whole mixed steps; as long as these are within the bound they
    lose time alone, and with it the worker serves fewer: so many as it serves in that time,
    weighed by how near to the bound its steps are.
    """
    tokens, before = own
    chunk = mixed_chunk_of(worker, rates, before)
    some = max(crowd, Crowd(1))
    step = rates.decodes(some)
    over = crowd.streams * gap_missed(rates.step(some, min(tokens, chunk), before), targets)
    # One more stream than there are: somebody comes while it is computed.
    lost = rates.added(tokens, chunk, before) * (crowd.streams + 1)
    return MixedSteps(over, -(-tokens // chunk), step, lost, (step / targets.itl) ** 2)


def joining(rates: Rates, crowd: Crowd, context: int, targets: Targets) -> float:
    """Requests that miss because one more, with ``context`` tokens, decodes beside ``crowd``: each
    of their steps is longer, and so they stay longer, by a share; all of them may come over the
    bound."""
    streams = crowd.streams
    before = rates.decodes(max(crowd, Crowd(1)))
    after = rates.decodes(crowd.joined(context))
    if not before:
        return 0.0
    slower = streams * max(0.0, after / before - 1) * (after / targets.itl) ** 2
    over = (streams + 1) * gap_missed(after, targets)
    return slower + max(0.0, over - (streams * gap_missed(before, targets) if streams else 0.0))


def kept_from_prompts(
    rates: Rates,
    worker: WorkerView,
    context: int,
    demand: Demand,
    stays: float,
    targets: Targets,
) -> float:
    """Requests whose first token is late because a prefill worker decodes one with ``context``
    tokens for ``stays`` seconds:
    its steps are mixed meanwhile, so that it computes fewer prompt tokens a second, and the mean
    wait (of a queue with random arrivals and equal service, M/D/1) grows. By the prompts of the
    whole fleet, since those which go elsewhere do so for what happens here; and as if nothing
    decoded there yet, since whoever joins others there keeps it from ending that."""
    mixed = mixed_chunk_of(worker, rates)
    most, seconds = rates.prompt[-1]
    alone = most / seconds
    beside = mixed / rates.step(worker.crowd.joined(context), mixed)
    slower = max(1.0, alone / beside)
    service, needed = demand.share / demand.prompts_per_s, demand.share + demand.queued
    before, after = (
        max(first_missed(_mean_ttft(share, seconds), targets), _beyond(share))
        for share, seconds in (
            (needed, service),
            (needed * slower, service * slower),
        )
    )
    late = after - before
    never = _beyond(needed * slower) - _beyond(needed)
    return demand.prompts_per_s * stays * max(late, never)


def own_gaps(
    rates: Rates, worker: WorkerView, crowd: Crowd, share: float, targets: Targets
) -> float:
    """The chance that a request which decodes in ``crowd``, with the others there, has too long
    gaps, by the steps that ``worker`` makes of prompts beside decodes: prompts take ``share`` of
    its time."""
    pure = gap_missed(rates.decodes(crowd), targets)
    mixed = gap_missed(rates.step(crowd, mixed_chunk_of(worker, rates)), targets)
    often = min(1.0, share / ALLOWED_GAPS)
    return max(pure, mixed * often)


def _beyond(share: float) -> float:
    """Of the prompts that come, those for which there is no time at all."""
    return max(0.0, 1.0 - 1.0 / share) if share else 0.0


def _mean_ttft(share: float, service: float) -> float:
    share = min(MOST_SHARE, share)
    return service * (1.0 + share / (2.0 * (1.0 - share)))
