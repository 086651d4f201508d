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
from tandem.router.placement.forecast import (
    Forecast,
    can_hold,
    forecast_pair,
    forecast_whole,
    stay_of,
)
from tandem.router.placement.prefix_load import (
    PrefixLoadPolicy,
    may_hand_over,
    may_meet,
    roomy,
    usable_workers,
)
from tandem.router.placement.pulls import PullPlan, best_pulls
from tandem.router.placement.rates import Rates, as_taught
from tandem.router.placement.snapshot import (
    Exclusions,
    FleetSnapshot,
    LinkPace,
    PromptFacts,
    WorkerView,
)

_Rates = Mapping[Incarnation, Rates | None]


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
        best = min(forecasts, key=_rank)
        pairs = [each for each in forecasts if each.way == "pair"]
        if pairs:
            pair = min(pairs, key=_rank)
            if pair.cost <= best.cost + self.patience:
                best = pair
        shown = sorted(forecasts, key=_rank)
        others = [each for each in shown if each is not best]
        rule = f"{best}" if not others else f"{best}; not {others[0]}"
        return Placement(best.worker, best.prefill, rule, best, tuple(shown))

    def forecasts(
        self, prompt: PromptFacts, fleet: FleetSnapshot, exclusions: Exclusions
    ) -> list[Forecast]:
        """Every way there is; none while nobody has computed a prompt."""
        found = usable_workers(prompt, fleet, exclusions)
        rates = {each.incarnation: Rates.of(each, fleet.workers) for each in found}
        usable = [self._taught(each, rates[each.incarnation]) for each in found]
        fits = [each for each in usable if can_hold(prompt, each)]
        decode = roomy(prompt, [each for each in fits if each.role is WorkerRole.DECODE])
        prefill = [
            each
            for each in fits
            if each.role is WorkerRole.PREFILL and each.incarnation not in exclusions.prefill
        ]
        pulls = best_pulls(prompt, fleet, rates)
        tokens = expected_tokens(prompt, usable, rates)
        ways = self._pairs(prompt, prefill, decode, rates, fleet, exclusions, pulls, tokens)
        demand = Demand.of(usable, fleet.arrivals)
        fleetwide = (stay_of(*usable) if usable else None, demand, tokens)
        alone = [(each, "decode") for each in decode]
        if self._may_stay(prompt, fleet):
            alone += [(each, "prefill") for each in roomy(prompt, prefill)]
        for worker, way in alone:
            for pull in _with_and_without(pulls, worker):
                ways.append(self._whole(prompt, worker, rates, way, fleetwide, pull))
        return [each for each in ways if each is not None]

    def _pairs(
        self,
        prompt: PromptFacts,
        prefill: Sequence[WorkerView],
        decode: Sequence[WorkerView],
        rates: _Rates,
        fleet: FleetSnapshot,
        exclusions: Exclusions,
        pulls: Mapping[Incarnation, PullPlan],
        tokens: float,
    ) -> list[Forecast | None]:
        if exclusions.no_handoff or prompt.whole:
            return []
        ways: list[Forecast | None] = []
        for producer in prefill:
            if not may_hand_over(prompt, producer):
                continue
            for consumer in decode:
                both = rates[producer.incarnation], rates[consumer.incarnation]
                if both[0] is None or both[1] is None:
                    continue
                if not may_meet(producer, consumer, fleet, exclusions):
                    continue
                if prompt.num_tokens - prompt.hits.get(consumer.incarnation, 0) < (
                    self.min_handoff_tokens
                ):
                    continue
                pace = fleet.paces.get((producer.incarnation, consumer.incarnation), LinkPace())
                ends, both_known = (producer, consumer), (both[0], both[1])
                ways += [
                    forecast_pair(
                        prompt, *ends, pace, both_known, self.targets, tokens=tokens, pull=pull
                    )
                    for pull in _with_and_without(pulls, producer)
                ]
        return ways

    def _whole(
        self,
        prompt: PromptFacts,
        worker: WorkerView,
        rates: _Rates,
        way: str,
        fleetwide: tuple[float | None, Demand, float],
        pull: PullPlan | None,
    ) -> Forecast | None:
        known = rates[worker.incarnation]
        if known is None:
            return None
        stays, demand, tokens = fleetwide
        return forecast_whole(
            prompt,
            worker,
            known,
            self.targets,
            way=way,
            stays=stays,
            demand=demand,
            tokens=tokens,
            pull=pull,
        )

    def _taught(self, worker: WorkerView, rates: Rates | None) -> WorkerView:
        return worker if rates is None else as_taught(worker, rates, self.targets.itl)

    def _may_stay(self, prompt: PromptFacts, fleet: FleetSnapshot) -> bool:
        """A prefill worker decodes for decode workers that are there: where none is, the service
        is not whole, and waiting for one is right. A strict service never has it decode."""
        if math.isinf(self.patience):
            return False
        return any(each.role is WorkerRole.DECODE for each in fleet.workers)


def _with_and_without(
    pulls: Mapping[Incarnation, PullPlan], worker: WorkerView
) -> tuple[PullPlan | None, ...]:
    plan = pulls.get(worker.incarnation)
    return (None,) if plan is None else (None, plan)


def _rank(forecast: Forecast) -> tuple[float, bytes, bytes]:
    return (forecast.cost, forecast.prefill or b"", forecast.worker)
