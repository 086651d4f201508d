"""What each way would come to for one prompt, in seconds, from rates that were measured. Pure.

Three ways: a prefill worker hands over to a decode worker (``pair``), a decode worker computes the
prompt beside what it decodes (``decode``), a prefill worker goes on with what it computed
(``prefill``). Each has a time to the first token, one more to the second, and a number of requests
that miss their bounds for it, this one among them (``damage``). One cost in seconds puts them
together. No length of a prompt is treated by itself.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from tandem.protocol.ids import Incarnation
from tandem.router.placement.damage import Targets, behind, first_missed, kept_from_prompts
from tandem.router.placement.ends import Computing, Decoding, Outlook, Producing
from tandem.router.placement.load import is_full
from tandem.router.placement.pulls import PullPlan, with_pull
from tandem.router.placement.room import stay_of, wait_for_room
from tandem.router.placement.snapshot import LinkPace

UNKNOWN_TAIL = 0.02
"""Seconds between the first token and the second over a link that has not been used."""
MISS = 1.0
"""Seconds of waiting that a request outside its bounds is worth."""
ANSWER = 0.1
"""Seconds of waiting for a first token that a second of a longer answer is worth."""
SPREADS = 2.0
"""Mean differences above its mean for which a second token is still waited for."""
HELD_SHARE = 0.8
"""Of the bound of first tokens, how late one may be that is held back."""
PREEMPTING = 1e3
"""Seconds for computing a prompt on a decode worker that is about to preempt others for it."""


class Forecast(NamedTuple):
    """One way, and what it would come to; in seconds where nothing else is said. Of a large fleet
    there are hundreds for each prompt: a tuple is made in a fraction of a frozen dataclass's time.
    """

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
    producing: Producing, decoding: Decoding, pace: LinkPace, targets: Targets
) -> Forecast:
    """Prefill there, hand over, decode here. As many times as there are pairs: all that hangs on
    one end alone comes with it."""
    computing, consumer, ttft = producing.computing, decoding.worker, producing.ttft
    second = pace.tail_s if pace.tail_s is not None else UNKNOWN_TAIL
    second += pace.wait + decoding.step
    second += decoding.room
    damage = producing.late + first_missed(second, targets)
    damage += producing.behind
    damage += decoding.joining
    damage += decoding.gaps
    if computing.mixed is not None:
        damage += computing.mixed.missed(stay_of(computing.worker, consumer))
    answers = decoding.answers + computing.slowed
    cost = ttft + second + MISS * damage + ANSWER * answers
    cost += producing.fault + decoding.fault
    both = consumer.incarnation, computing.worker.incarnation
    hold = held_back(pace, decoding.step, ttft, targets)
    until = HELD_SHARE * targets.ttft
    return Forecast("pair", *both, ttft, second, damage, cost, answers, computing.pull, hold, until)


def forecast_decode(outlook: Outlook, computing: Computing, decoding: Decoding) -> Forecast:
    """All of it on a decode worker, its prompt in chunks beside what it decodes."""
    return _whole("decode", outlook, computing, decoding, _first_alone(outlook, computing))


def forecast_prefill(outlook: Outlook, computing: Computing) -> Forecast:
    """A prefill worker goes on decoding what it computed, which keeps it from prompts."""
    worker, alone, stays = computing.worker, computing.alone, outlook.stays
    ttft = _first_alone(outlook, computing)
    demand = outlook.demand.at_least(alone, stays, max(0.0, ttft - alone))
    share = max(worker.prompt_share, demand.share)
    decoding = Decoding.of(outlook, worker, computing.rates, share)
    context = outlook.prompt.num_tokens
    kept = kept_from_prompts(computing.rates, worker, context, demand, stays, outlook.targets)
    return _whole("prefill", outlook, computing, decoding, ttft, kept)


def _first_alone(outlook: Outlook, computing: Computing) -> float:
    """Seconds to the first token where one worker does it all, which wants room first."""
    worker = computing.worker
    return computing.ttft + wait_for_room(with_pull(outlook.prompt, worker, computing.pull), worker)


def _whole(
    way: str,
    outlook: Outlook,
    computing: Computing,
    decoding: Decoding,
    ttft: float,
    kept: float = 0.0,
) -> Forecast:
    """``kept``: requests that miss because it decodes where prompts are computed."""
    worker, targets, second = computing.worker, outlook.targets, decoding.step
    damage = first_missed(ttft, targets) + behind(worker, ttft, computing.alone, targets)
    damage += decoding.joining
    if computing.mixed is not None:
        damage += computing.mixed.missed(outlook.stays)
    damage += kept
    damage += decoding.gaps
    answers = decoding.answers + computing.slowed
    cost = ttft + second + MISS * damage + ANSWER * answers + decoding.fault
    cost += PREEMPTING if way == "decode" and is_full(worker) else 0.0
    named = worker.incarnation, None
    return Forecast(way, *named, ttft, second, damage, cost, answers, computing.pull)


def held_back(pace: LinkPace, step: float, ttft: float, targets: Targets) -> float:
    """Seconds for which a first token is kept for the second to follow within the bound of gaps:
    by how much it mostly comes later than that, a ``step`` behind the decode worker's first word,
    which repeats the first, as the tails of the link's last hand-offs say. No more than the bound
    itself, and never so much that the first would be late."""
    if pace.tail_s is None:
        return 0.0
    late = pace.tail_s + SPREADS * pace.tail_spread_s + step - targets.itl
    return max(0.0, min(late, targets.itl, HELD_SHARE * targets.ttft - ttft))
