"""The interface of a placement policy, and its answer.

A policy is pure: same facts, same answer. It is asked once per attempt, in the event loop, so it
must be quick: no stream gets a token meanwhile (`bench/router/placement.py` measures it).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from tandem.protocol.ids import Incarnation
from tandem.router.placement.forecast import Forecast
from tandem.router.placement.pulls import PullPlan
from tandem.router.placement.snapshot import Exclusions, FleetSnapshot, PromptFacts


@dataclass(frozen=True, slots=True)
class Placement:
    """Where an attempt goes."""

    worker: Incarnation
    """Runs the request to its end: the decode leg, or all of it."""
    prefill: Incarnation | None
    """Prefills and hands over; None: ``worker`` does both halves."""
    rule: str
    """Why this shape: hand-off, or which reason kept the request whole."""

    forecast: Forecast | None = None
    """What it was expected to come to, where rates are known."""
    considered: tuple[Forecast, ...] = ()
    """All ways that were looked at, the cheapest first."""

    @property
    def pull(self) -> PullPlan | None:
        """What who computes the prompt pulls from a peer first."""
        return None if self.forecast is None else self.forecast.pull

    def hits_with_pull(self, hits: Mapping[Incarnation, int]) -> Mapping[Incarnation, int]:
        """Tokens of the prompt that workers need not compute, with what is pulled."""
        computes = self.prefill or self.worker
        return hits if self.pull is None else {**hits, computes: self.pull.num_tokens}

    @property
    def pair(self) -> tuple[Incarnation, Incarnation] | None:
        """The (prefill, decode) link that is used, if one is."""
        return None if self.prefill is None else (self.prefill, self.worker)


class PlacementPolicy(Protocol):
    """Chooses workers for one attempt."""

    def place(
        self, prompt: PromptFacts, fleet: FleetSnapshot, now: float, exclusions: Exclusions
    ) -> Placement | None:
        """The best place outside ``exclusions``, or None when nobody can take the request."""
        ...
