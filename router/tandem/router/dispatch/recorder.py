"""Record of a call's attempts, legs and placements."""

from __future__ import annotations

import time
from dataclasses import dataclass

from tandem.protocol.context import Route, Shape
from tandem.protocol.requests import EngineCoreRequest
from tandem.protocol.timeline import Watch
from tandem.router.dispatch.attempt import Attempt
from tandem.router.dispatch.retry_policy import AttemptFailure
from tandem.router.placement.snapshot import FleetSnapshot, PromptFacts
from tandem.tracing.recording import AttemptRecord, LegRecord, Recording

_NUMBERS = {
    "max_tokens": "gen_ai.request.max_tokens",
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
}


@dataclass(frozen=True, slots=True)
class Scene:
    """Input of a placement."""

    facts: PromptFacts
    fleet: FleetSnapshot


def begin_attempt(
    recording: Recording,
    attempt: Attempt,
    attempt_kind: str,
    request: EngineCoreRequest,
    scene: Scene | None,
) -> Watch:
    """Record an attempt before it is sent; return the watch for its workers."""
    now = time.monotonic()
    number, rule = attempt.number, attempt.placement.rule
    recording.num_prompt = max(recording.num_prompt, len(request.prompt_token_ids))
    record = AttemptRecord(number, rule, attempt_kind, now, scene=scene)
    if not recording.attempt(record):
        return recording.watch  # an unsampled span would have no end
    attempt.record = record
    if recording.span is None:
        return recording.watch
    if recording.asked is None:
        recording.asked = _asked(request)
    said = {"tandem.attempt": number, "tandem.attempt_kind": attempt_kind, "tandem.rule": rule}
    begin = now - recording.arrived + recording.started
    record.span = recording.span.child("attempt", begin, "client", said)
    return Watch(recording.request_id, record.span.traceparent)


def _asked(request: EngineCoreRequest) -> dict[str, float]:
    """Return numbers of a request by OpenTelemetry's names for GenAI."""
    params = request.params
    if request.pooling is not None:
        return {}
    found = {attribute: getattr(params, name) for name, attribute in _NUMBERS.items()}
    said = {attribute: value for attribute, value in found.items() if value is not None}
    if params.n > 1:
        said["gen_ai.request.choice.count"] = params.n
    return said


def note_sent(attempt: Attempt) -> None:
    """Record that an attempt was sent to its workers."""
    record, now = attempt.record, time.monotonic()
    if record is None:
        return
    for leg in attempt.legs:
        leg.record = LegRecord(str(leg.worker.role), leg.worker.name, now)
        record.legs.append(leg.record)


def note_end(attempt: Attempt, failure: AttemptFailure | None) -> None:
    """Record the end of an attempt."""
    record = attempt.record
    if record is not None and record.end is None:
        record.end = time.monotonic()
        if failure is not None:
            record.failure = str(failure)
            record.failed_worker = failure.worker_name


def note_way(route: Route | None, attempt: Attempt) -> None:
    """Record a canary's workers and shape."""
    if route is None:
        return
    revisions = {leg.is_prefill: leg.worker.note.revision for leg in attempt.legs}
    paired = attempt.placement.prefill is not None
    route.served_shape = Shape.DISAGGREGATED if paired else Shape.AGGREGATED
    route.served_prefill = revisions.get(True, "")
    route.served_decode = revisions.get(False, "")
