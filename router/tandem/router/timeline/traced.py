"""Spans of a call in the router, with the names of OpenTelemetry's conventions for GenAI."""

from __future__ import annotations

from typing import Any

from tandem.protocol.recording import AttemptRecord, Recording

PROVIDER = "tandem"
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/messages/count_tokens": "count_tokens",
    "/v1/embeddings": "embeddings",
    "/v1/score": "score",
    "/v1/rerank": "rerank",
}
_OTHER = "call"
"""Name of other paths. Names of spans become series of collectors: there are as many as are listed
here, whatever paths clients request."""
_SPANS = frozenset(
    {"read body", "parse", "tokenize", "admission", "hash", "turn", "place", "no worker"}
)


def operation_of(path: str) -> str:
    """Return the conventions' name for a path's operation, or the API's own."""
    return _OPERATIONS.get(path, _OTHER)


def write_spans(recording: Recording, model: str) -> None:
    """Write all spans below the call's own, and its end."""
    root = recording.span
    offset = recording.started - recording.arrived
    end = recording.ended if recording.ended is not None else recording.arrived
    for mark in recording.marks:
        if mark.name in _SPANS:
            root.child(mark.name, mark.begin + offset).end(mark.end + offset)
    for attempt in recording.attempts:
        _end_attempt(attempt, end, offset)
    first = recording.first_output
    if first is not None:
        stream = root.child("stream", first + offset)
        said = {
            "tandem.waiting_seconds": recording.wait_seconds,
            "tandem.writing_seconds": recording.write_seconds,
            "tandem.num_outputs": recording.num_outputs,
        }
        stream.end(end + offset, said)
    status = recording.status
    error = f"status {status}" if status >= 500 or not status else None
    root.end(end + offset, _attributes(recording, model), error)


def _end_attempt(attempt: AttemptRecord, end: float, offset: float) -> None:
    if attempt.span is None:
        return
    first = min((leg.first for leg in attempt.legs if leg.first is not None), default=None)
    if first is not None:
        attempt.span.event("first token", first + offset)
    said = {f"tandem.{leg.role}": leg.worker for leg in attempt.legs}
    until = attempt.end if attempt.end is not None else end
    if attempt.failure is not None:
        said["error.type"] = "attempt_failed"
    attempt.span.end(until + offset, said, attempt.failure)


def _attributes(recording: Recording, model: str) -> dict[str, Any]:
    said: dict[str, Any] = {
        "gen_ai.operation.name": operation_of(recording.path),
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.usage.input_tokens": recording.num_prompt,
        "gen_ai.usage.output_tokens": recording.num_tokens,
        "gen_ai.usage.cache_read.input_tokens": recording.num_cached,
        "http.request.method": "POST",
        "http.response.status_code": recording.status,
        "tandem.request_id": recording.request_id,
    }
    if recording.route:
        said["http.route"] = recording.route
    if recording.status >= 400:
        said["error.type"] = str(recording.status)
    if recording.finishes:
        said["gen_ai.response.finish_reasons"] = recording.finishes
    if recording.first_output is not None:
        seconds = recording.first_output - recording.arrived
        said["gen_ai.response.time_to_first_chunk"] = seconds
    return said | (recording.asked or {})
