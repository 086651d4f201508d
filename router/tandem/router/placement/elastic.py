"""Placement by what each way would come to: the policy of routers unless hand-offs are a must.

Every prefill and decode worker, alone and in pairs, is a candidate; the cheapest forecast is taken.
A prompt leaves the pair only for what is cheaper by ``patience``, so that small differences do not
have it flap; infinite patience is strict hand-off. Before a prompt was computed anywhere nothing is
known, and the policy of tokens decides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from tandem.protocol.card import WorkerRole
from tandem.protocol.ids import Incarnation
from tandem.router.placement.answers import expected_tokens
from tandem.router.placement.base import Placement
from tandem.router.placement.damage import Demand, Targets
from tandem.router.placement.ends import Computing, Decoding, Outlook, Producing
from tandem.router.placement.forecast import (
    Forecast,
    forecast_decode,
    forecast_pair,
    forecast_prefill,
)
from tandem.router.placement.prefix_load import (
    PrefixLoadPolicy,
    may_hand_over,
    may_meet,
    roomy,
    usable_workers,
)
from tandem.router.placement.pulls import PullPlan, best_pulls
from tandem.router.placement.rates import Rates, StandIns, as_taught
from tandem.router.placement.room import can_hold, stay_of
from tandem.router.placement.snapshot import (
    UNUSED,
    Exclusions,
    FleetSnapshot,
    PromptFacts,
    WorkerView,
)


class ElasticPolicy:
    """``min_handoff_tokens`` and ``patience`` as flags say them, ``targets`` what clients want."""

    def __init__(self, min_handoff_tokens: int, patience: float, targets: Targets) -> None:
        self._by_tokens = PrefixLoadPolicy(min_handoff_tokens, patience)
        self.min_handoff_tokens = min_handoff_tokens
        self.patience = patience
        self.targets = targets

    def place(
        self, prompt: PromptFacts, fleet: FleetSnapshot, now: float, exclusions: Exclusions
    ) -> Placement | None:
        """The cheapest way outside ``exclusions``; None when there is none."""
        if prompt.pooled or prompt.shape is not None or prompt.one_token:
            return self._by_tokens.place(prompt, fleet, now, exclusions)
        forecasts = self.forecasts(prompt, fleet, exclusions)
        if not forecasts:
            return self._by_tokens.place(prompt, fleet, now, exclusions)
        shown = sorted(forecasts, key=_rank)
        best = shown[0]
        pair = next((each for each in shown if each.way == "pair"), None)
        if pair is not None and pair.cost <= best.cost + self.patience:
            best = pair
        other = next((each for each in shown if each is not best), None)
        rule = f"{best}" if other is None else f"{best}; not {other}"
        return Placement(best.worker, best.prefill, rule, best, tuple(shown))

    def forecasts(
        self, prompt: PromptFacts, fleet: FleetSnapshot, exclusions: Exclusions
    ) -> list[Forecast]:
        """Every way there is; none while nobody has computed a prompt."""
        found = usable_workers(prompt, fleet, exclusions)
        rates = _rates_of(found, StandIns.of(fleet.workers))
        if not rates:
            return []
        usable = [as_taught(each, rates[each.incarnation], self.targets.itl) for each in found]
        tokens, demand = expected_tokens(prompt, usable, rates), Demand.of(usable, fleet.arrivals)
        outlook = Outlook(prompt, self.targets, tokens, stay_of(*usable), demand)
        prefill, decode = _able(prompt, usable, exclusions)
        pulls = best_pulls(prompt, fleet, rates)
        computing = {
            each.incarnation: _computing(outlook, each, rates[each.incarnation], pulls)
            for each in (*prefill, *decode)
        }
        decoding = [
            Decoding.of(outlook, each, rates[each.incarnation], each.prompt_share)
            for each in decode
        ]
        producing = [
            [Producing.of(outlook, end) for end in computing[each.incarnation]]
            for each in prefill
            if may_hand_over(prompt, each)
        ]
        ways = self._pairs(prompt, producing, decoding, fleet, exclusions)
        for end in decoding:
            alone = computing[end.worker.incarnation]
            ways += [forecast_decode(outlook, each, end) for each in alone]
        for worker in roomy(prompt, prefill) if self._may_stay(fleet) else ():
            ways += [forecast_prefill(outlook, each) for each in computing[worker.incarnation]]
        return ways

    def _pairs(
        self,
        prompt: PromptFacts,
        producing: Sequence[Sequence[Producing]],
        decoding: Sequence[Decoding],
        fleet: FleetSnapshot,
        exclusions: Exclusions,
    ) -> list[Forecast]:
        """``producing``: each prefill worker without and, if there is one, with its pull."""
        if exclusions.no_handoff or prompt.whole:
            return []
        most_cached = prompt.num_tokens - self.min_handoff_tokens
        taking = [
            each for each in decoding if prompt.hits.get(each.worker.incarnation, 0) <= most_cached
        ]
        ways: list[Forecast] = []
        for ends in producing:
            producer = ends[0].computing.worker
            for end in taking:
                consumer = end.worker
                if not may_meet(producer, consumer, fleet, exclusions):
                    continue
                pace = fleet.paces.get((producer.incarnation, consumer.incarnation), UNUSED)
                ways += [forecast_pair(each, end, pace, self.targets) for each in ends]
        return ways

    def _may_stay(self, fleet: FleetSnapshot) -> bool:
        """A prefill worker decodes for decode workers that are there: where none is, the service
        is not whole, and waiting for one is right. A strict service never has it decode."""
        if math.isinf(self.patience):
            return False
        return any(each.role is WorkerRole.DECODE for each in fleet.workers)


def _rates_of(workers: Sequence[WorkerView], others: StandIns) -> dict[Incarnation, Rates]:
    """Of each; of none while nobody has computed a prompt."""
    found = ((each.incarnation, Rates.of(each, others)) for each in workers)
    return {incarnation: rates for incarnation, rates in found if rates is not None}


def _able(
    prompt: PromptFacts, usable: Sequence[WorkerView], exclusions: Exclusions
) -> tuple[list[WorkerView], list[WorkerView]]:
    """Prefill and decode workers that can hold it."""
    fits = [each for each in usable if can_hold(prompt, each)]
    prefill = [
        each
        for each in fits
        if each.role is WorkerRole.PREFILL and each.incarnation not in exclusions.prefill
    ]
    return prefill, roomy(prompt, [each for each in fits if each.role is WorkerRole.DECODE])


def _computing(
    outlook: Outlook, worker: WorkerView, rates: Rates, pulls: Mapping[Incarnation, PullPlan]
) -> list[Computing]:
    """Without and, if there is one, with its pull."""
    plan = pulls.get(worker.incarnation)
    ways = (None,) if plan is None else (None, plan)
    return [Computing.of(outlook, worker, rates, pull) for pull in ways]


def _rank(forecast: Forecast) -> tuple[float, bytes, bytes]:
    return (forecast.cost, forecast.prefill or b"", forecast.worker)
