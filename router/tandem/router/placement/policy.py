"""Placement of a prompt by the lowest predicted cost.

Policies are pure, and fast, as they run in the event loop.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from zlib import crc32

from tandem.protocol.card import WorkerRole
from tandem.protocol.ids import Incarnation
from tandem.router.placement.forecast import (
    Decoding,
    Forecast,
    Outlook,
    Prefilling,
    PullPlan,
    Targets,
    best_pulls,
    forecast_decode,
    forecast_pair,
    forecast_prefill,
    forecast_prompt,
)
from tandem.router.placement.rates import Rates, measured, with_mixed_chunk
from tandem.router.placement.snapshot import (
    UNUSED,
    Exclusions,
    FleetSnapshot,
    PromptFacts,
    WorkerView,
    fitting,
    linked,
    long_enough,
    may_hand_over,
    usable_workers,
)

DISAGGREGATED, AGGREGATED = "disaggregated", "aggregated"


@dataclass(frozen=True, slots=True)
class Placement:
    """Workers of an attempt."""

    worker: Incarnation
    """Worker of the decode leg, or of the whole attempt."""
    prefill: Incarnation | None
    """Worker that computes the prompt and hands over; None: ``worker`` does both."""
    rule: str
    """Reason for this way, for logs and ``/debug``."""
    forecast: Forecast | None = None
    considered: tuple[Forecast, ...] = ()
    """All ways, the cheapest first."""

    @property
    def pull(self) -> PullPlan | None:
        """Return the pull of the prefilling worker."""
        return None if self.forecast is None else self.forecast.pull

    def hits_with_pull(self, hits: Mapping[Incarnation, int]) -> Mapping[Incarnation, int]:
        """Return the prompt's cached tokens by worker, after the pull."""
        computes = self.prefill or self.worker
        return hits if self.pull is None else {**hits, computes: self.pull.num_tokens}

    @property
    def pair(self) -> tuple[Incarnation, Incarnation] | None:
        """Return the (prefill, decode) link of a hand-off, or None."""
        return None if self.prefill is None else (self.prefill, self.worker)


@dataclass(frozen=True, slots=True)
class _Usable:
    """Workers that may serve a prompt, by role, and their times."""

    prefill: list[WorkerView]
    decode: list[WorkerView]
    rates: Mapping[Incarnation, Rates]
    is_measured: bool


class PlacementPolicy:
    """Placement of prompts.

    ``patience``: seconds by which another way must be cheaper than a hand-off. ``strict``: always
    hand off if possible; prefill workers never decode.
    """

    def __init__(self, targets: Targets, patience: float, *, strict: bool = False) -> None:
        self.targets = targets
        self.patience = math.inf if strict else patience
        self.strict = strict

    def place(
        self, prompt: PromptFacts, fleet: FleetSnapshot, exclusions: Exclusions
    ) -> Placement | None:
        """Return the cheapest way outside ``exclusions``, or None."""
        usable = _usable(prompt, fleet, exclusions, self.targets.itl)
        if prompt.query_key is not None:
            return _by_key(prompt.query_key, usable.prefill or usable.decode)
        free = prompt.shape is None and (prompt.pooled or not exclusions.no_handoff)
        if prompt.one_token and usable.prefill and free:
            ways = self._prompt_ways(prompt, fleet, usable, usable.prefill)
        elif prompt.pooled:
            ways = self._prompt_ways(prompt, fleet, usable, usable.decode)
        else:
            ways = self._ways(prompt, fleet, usable, exclusions)
        if not ways:
            return None
        ways.sort(key=_rank)
        best, patience = ways[0], self.patience if usable.is_measured else math.inf
        for each in ways:
            if each.way == "pair":
                best = each if each.cost <= best.cost + patience else best
                break
        rule = f"{best}"
        for other in ways[:2]:
            if other is not best:
                rule = f"{best}; not {other}"
                break
        return Placement(best.worker, best.prefill, rule, best, tuple(ways))

    def _prompt_ways(
        self,
        prompt: PromptFacts,
        fleet: FleetSnapshot,
        usable: _Usable,
        workers: Sequence[WorkerView],
    ) -> list[Forecast]:
        """Return the ways of a request that ends with its prompt or its first token."""
        if not workers:
            return []
        outlook = Outlook.of(prompt, self.targets, fleet, workers, usable.rates)
        return [
            forecast_prompt(outlook, each)
            for worker in workers
            for each in _prefilling(outlook, worker, usable.rates, {})
        ]

    def _ways(
        self, prompt: PromptFacts, fleet: FleetSnapshot, usable: _Usable, exclusions: Exclusions
    ) -> list[Forecast]:
        if not usable.decode and not (usable.prefill and self._may_stay(fleet)):
            return []
        both = [*usable.prefill, *usable.decode]
        outlook = Outlook.of(prompt, self.targets, fleet, both, usable.rates)
        pulls = best_pulls(prompt, fleet, usable.rates)
        prefilling = {
            each.incarnation: _prefilling(outlook, each, usable.rates, pulls) for each in both
        }
        decoding = [
            Decoding.of(outlook, each, usable.rates[each.incarnation], each.prompt_share)
            for each in usable.decode
        ]
        ways: list[Forecast] = []
        if not (exclusions.no_handoff or prompt.whole or prompt.shape == AGGREGATED):
            ways += _pairs(outlook, fleet, exclusions, usable.prefill, prefilling, decoding)
        if prompt.shape == DISAGGREGATED or (self.strict and ways):
            return ways
        for end in decoding:
            alone = prefilling[end.worker.incarnation]
            ways += [forecast_decode(outlook, each, end) for each in alone]
        if prompt.shape is None and self._may_stay(fleet):
            for worker in long_enough(prompt, usable.prefill):
                ways += [forecast_prefill(outlook, e) for e in prefilling[worker.incarnation]]
        return ways

    def _may_stay(self, fleet: FleetSnapshot) -> bool:
        """Return whether a prefill worker may decode: only if a decode worker is up."""
        return not self.strict and any(each.role is WorkerRole.DECODE for each in fleet.workers)


def _usable(
    prompt: PromptFacts, fleet: FleetSnapshot, exclusions: Exclusions, itl: float
) -> _Usable:
    able = usable_workers(prompt, fleet, exclusions)
    known = measured(fleet.workers)
    default = known or Rates()
    rates = {each.incarnation: default.of(each) for each in able}
    found = [with_mixed_chunk(each, rates[each.incarnation], itl) for each in able]
    prefill = [
        each
        for each in found
        if each.role is WorkerRole.PREFILL and each.incarnation not in exclusions.prefill
    ]
    decode = [each for each in found if each.role is WorkerRole.DECODE]
    return _Usable(
        fitting(prompt, prefill),
        long_enough(prompt, fitting(prompt, decode)),
        rates,
        known is not None,
    )


def _prefilling(
    outlook: Outlook,
    worker: WorkerView,
    rates: Mapping[Incarnation, Rates],
    pulls: Mapping[Incarnation, PullPlan],
) -> list[Prefilling]:
    """Return the worker's times without a pull and, if there is one, with it."""
    plan = pulls.get(worker.incarnation)
    own = rates[worker.incarnation]
    return [
        Prefilling.of(outlook, worker, own, each)
        for each in ((None,) if plan is None else (None, plan))
    ]


def _pairs(
    outlook: Outlook,
    fleet: FleetSnapshot,
    exclusions: Exclusions,
    producers: Sequence[WorkerView],
    prefilling: Mapping[Incarnation, Sequence[Prefilling]],
    decoding: Sequence[Decoding],
) -> Iterator[Forecast]:
    for producer in producers:
        if not may_hand_over(outlook.prompt, producer):
            continue
        for end in decoding:
            if not linked(producer, end.worker, fleet, exclusions):
                continue
            throughput = fleet.paces.get((producer.incarnation, end.worker.incarnation), UNUSED)
            for each in prefilling[producer.incarnation]:
                yield forecast_pair(outlook, each, end, throughput)


def _rank(forecast: Forecast) -> tuple[float, int, bytes, bytes]:
    return (forecast.cost, forecast.num_requests, forecast.prefill or b"", forecast.worker)


def _by_key(key: str, workers: Sequence[WorkerView]) -> Placement | None:
    """Return the same worker for equal keys while the same workers are up."""
    if not workers:
        return None
    ordered = sorted(workers, key=lambda each: each.incarnation)
    found = ordered[crc32(key.encode()) % len(ordered)]
    return Placement(found.incarnation, None, "its query is kept by one worker")
