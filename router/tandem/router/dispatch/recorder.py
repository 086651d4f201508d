"""What the dispatcher adds to the record of a call: attempts, legs, and why they went there."""

from __future__ import annotations

import time
from dataclasses import dataclass

from tandem.protocol.context import Route, Shape
from tandem.protocol.recording import AttemptRecord, LegRecord, Recording
from tandem.router.dispatch.attempt import Attempt
from tandem.router.dispatch.failure import AttemptFailure
from tandem.router.placement.snapshot import FleetSnapshot, PromptFacts


@dataclass(frozen=True, slots=True)
class Scene:
    """What placement saw; who wants its numbers computes them from this."""

    facts: PromptFacts
    fleet: FleetSnapshot


def note_sent(
    recording: Recording,
    attempt: Attempt,
    rung: str,
    begin: float,
    *,
    num_prompt: int,
    scene: Scene | None,
) -> None:
    """An attempt was sent to its workers."""
    now = time.monotonic()
    recording.num_prompt = max(recording.num_prompt, num_prompt)
    record = AttemptRecord(attempt.number, attempt.placement.rule, rung, begin, scene=scene)
    for leg in attempt.legs:
        leg.record = LegRecord(str(leg.worker.role), leg.worker.name, now)
        record.legs.append(leg.record)
    attempt.record = record
    recording.attempt(record)


def note_end(attempt: Attempt, failure: AttemptFailure | None) -> None:
    """An attempt is over."""
    record = attempt.record
    if record is not None and record.end is None:
        record.end = time.monotonic()
        if failure is not None:
            record.failure = str(failure)
            record.failed_worker = failure.worker_name


def note_way(route: Route | None, attempt: Attempt) -> None:
    """For a canary: which workers speak."""
    if route is None:
        return
    revisions = {leg.is_prefill: leg.worker.note.revision for leg in attempt.legs}
    paired = attempt.placement.prefill is not None
    route.served_shape = Shape.DISAGGREGATED if paired else Shape.AGGREGATED
    route.served_prefill = revisions.get(True, "")
    route.served_decode = revisions.get(False, "")
