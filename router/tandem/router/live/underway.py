"""Counts of the requests under way by what they wait for; computed on request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from tandem.router.dispatch.attempt import LegState
from tandem.router.dispatch.job import Job
from tandem.router.placement.links import Pair

PHASES = ("admission", "no_worker", "sent", "prefill", "handoff", "decode", "client")
"""Phases in the order in which a request goes through them."""


@dataclass(slots=True)
class Underway:
    """Requests by phase, and those on their way over each hand-off link."""

    phases: Counter[str] = field(default_factory=Counter)
    handoffs: Counter[Pair] = field(default_factory=Counter)

    @classmethod
    def of(cls, jobs: Collection[Job]) -> Underway:
        """Count."""
        found = cls()
        for job in jobs:
            found.phases[phase_of(job)] += 1
            attempt = job.attempt
            pair = None if attempt is None else attempt.placement.pair
            if attempt is not None and pair is not None and not attempt.decoding:
                found.handoffs[pair] += 1
        return found

    def to_json(self) -> dict[str, int]:
        """Return all phases, in order."""
        return {phase: self.phases[phase] for phase in PHASES}


def phase_of(job: Job) -> str:
    """Return the phase of a request, by what it waits for.

    admission   its turn in the router's queue
    no_worker   a worker that could take it
    sent        a worker's acceptance
    prefill     its first token
    handoff     the first output of the decode worker
    decode      its end
    client      the client, which has yet to read the end
    """
    attempt = job.attempt
    if attempt is None:
        return "no_worker" if job.admitted else "admission"
    if not job.admitted:
        return "client"
    if attempt.decoding:
        return "decode"
    if any(leg.spoke for leg in attempt.legs):
        return "handoff"
    if all(leg.state is LegState.SENT for leg in attempt.legs):
        return "sent"
    return "prefill"
