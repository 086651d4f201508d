"""Records of calls to /v1; the last ones are kept."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from typing import Any

from starlette.types import Scope

from tandem.router.dispatch.job import Scene
from tandem.router.observe.timeline.view import MAX_SHORT_PARTS, short
from tandem.router.tenant import Tenant, TenantParts
from tandem.tracing.config import traceparent_of
from tandem.tracing.recording import AttemptRecord, Recording, begin
from tandem.tracing.spans import Spans

UNAUTHORIZED = 401
_CALL_BYTES = 1_500
_MARK_BYTES = 120
_LEG_BYTES = 500
_NOTE_BYTES = 130
_VIEW_BYTES = 600
_LINK_BYTES = 100
_PACE_BYTES = 350
_ROW_BYTES = 60
"""Estimate of an entry's memory."""


def weigh(recording: Recording) -> int:
    """Return an estimate of a record's memory in bytes, with rows of its views."""
    num_covers = len(recording.marks)
    size = _CALL_BYTES + _MARK_BYTES * len(recording.marks)
    size += len(recording.request_id) + len(recording.path)
    for attempt in recording.attempts:
        size += _MARK_BYTES + len(attempt.failure or "")
        if isinstance(attempt.scene, Scene):
            fleet = attempt.scene.fleet
            size += _VIEW_BYTES * len(fleet.workers) + _PACE_BYTES * len(fleet.paces)
            size += _LINK_BYTES * (len(fleet.links) + len(fleet.pull_links))
        num_covers += 2
        for leg in attempt.legs:
            size += _LEG_BYTES
            if leg.times is not None:
                size += _NOTE_BYTES * len(leg.times.notes)
                num_covers += len(leg.times.notes) + 2
    # Each begins or ends a part; gaps are parts, too.
    return size + _ROW_BYTES * min(2 * num_covers + 3, MAX_SHORT_PARTS + 1)


class Ring:
    """Records of an app. Used in the loop's thread."""

    def __init__(self, max_calls: int, max_bytes: int) -> None:
        self.max_calls = max_calls
        self.max_bytes = max_bytes
        self._open: dict[int, Recording] = {}
        """Running calls."""
        self._kept: OrderedDict[int, Recording] = OrderedDict()
        self._parts: TenantParts[int] = TenantParts()

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def held(self) -> int:
        """Return the bytes of all ended calls."""
        return self._parts.num_bytes

    def num_kept(self, reader: Tenant) -> int:
        """Return the number of ended calls that ``reader`` may see."""
        return len(self._kept) if reader.is_admin else self._parts.count(reader.id)

    def open(self, recording: Recording) -> None:
        self._open[id(recording)] = recording

    def close(self, recording: Recording) -> None:
        """End a call. One without a key is not kept."""
        name = id(recording)
        self._open.pop(name, None)
        if recording.status == UNAUTHORIZED:
            return
        self._kept[name] = recording
        self._parts.add(recording.tenant, name, weigh(recording))
        while self._kept and (len(self._kept) > self.max_calls or self.held > self.max_bytes):
            gone = self._parts.first_to_go(by_bytes=len(self._kept) <= self.max_calls)
            self._parts.remove(gone)
            del self._kept[gone]

    def latest(self, most: int, reader: Tenant) -> list[Recording]:
        """Return the latest calls that ``reader`` may see, running ones first."""
        return list(islice(self._seen_by(reader), most))

    def find(self, request_id: str, reader: Tenant) -> Recording | None:
        """Return the latest call with that id or answer's id, if ``reader`` may see it."""
        for recording in self._seen_by(reader):
            name = recording.request_id
            if name == request_id or request_id.endswith(f"-{name}"):
                return recording
        return None

    def _seen_by(self, reader: Tenant) -> Iterator[Recording]:
        for each in (*reversed(self._open.values()), *reversed(self._kept.values())):
            if reader.may_read(each.tenant):
                yield each


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
"""Name of other paths: names become series of collectors, so they are bounded."""
_SPANS = frozenset(
    {"read body", "parse", "tokenize", "admission", "hash", "turn", "place", "no worker"}
)


def operation_of(path: str) -> str:
    """Return the convention's name of a path's operation, or the API's own."""
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
        attributes = {
            "tandem.waiting_seconds": recording.wait_seconds,
            "tandem.writing_seconds": recording.write_seconds,
            "tandem.num_outputs": recording.num_outputs,
        }
        stream.end(end + offset, attributes)
    status = recording.status
    error = f"status {status}" if status >= 500 or not status else None
    root.end(end + offset, _attributes(recording, model), error)


def _end_attempt(attempt: AttemptRecord, end: float, offset: float) -> None:
    if attempt.span is None:
        return
    first = min((leg.first for leg in attempt.legs if leg.first is not None), default=None)
    if first is not None:
        attempt.span.event("first token", first + offset)
    attributes = {f"tandem.{leg.role}": leg.worker for leg in attempt.legs}
    until = attempt.end if attempt.end is not None else end
    if attempt.failure is not None:
        attributes["error.type"] = "attempt_failed"
    attempt.span.end(until + offset, attributes, attempt.failure)


def _attributes(recording: Recording, model: str) -> dict[str, Any]:
    attributes: dict[str, Any] = {
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
        attributes["http.route"] = recording.route
    if recording.status >= 400:
        attributes["error.type"] = str(recording.status)
    if recording.finishes:
        attributes["gen_ai.response.finish_reasons"] = recording.finishes
    if recording.first_output is not None:
        seconds = recording.first_output - recording.arrived
        attributes["gen_ai.response.time_to_first_chunk"] = seconds
    return attributes | (recording.asked or {})


HEADER = "x-tandem-timeline"
ASKED = HEADER.encode()
MAX_PATH = 256
"""Maximum characters of a path in a record."""


class Recorder:
    """Recorder of an app. Used in the loop's thread."""

    def __init__(
        self,
        max_calls: int,
        max_bytes: int,
        *,
        spans: Spans | None = None,
        model: Callable[[], str] = lambda: "",
    ) -> None:
        """``model`` returns the model's name, for spans."""
        self.ring = Ring(max_calls, max_bytes)
        self._spans = spans
        self._model = model

    def open(self, scope: Scope, request_id: str, now: float) -> Recording | None:
        """Begin a call; return its record, or None if there is no room."""
        path = scope["path"]
        if scope["method"] != "POST" or not path.startswith("/v1/"):
            return None
        if not self.ring.max_calls and self._spans is None:
            return None
        recording = Recording(request_id, now, path=path[:MAX_PATH])
        self._join(recording, scope["headers"])
        if self.ring.max_calls:
            self.ring.open(recording)
        elif recording.span is None:
            return None
        begin(recording)
        return recording

    def _join(self, recording: Recording, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Set the trace of a call: the named one, or a new one if spans are sent."""
        named = _all(headers, b"traceparent")
        given = traceparent_of(named[0]) if len(named) == 1 else ""
        recording.traceparent = given
        if self._spans is None:
            return
        state = ",".join(_all(headers, b"tracestate"))  # one list, in any number of headers
        name = operation_of(recording.path)
        span = self._spans.begin(name, recording.started, given, state)
        recording.traceparent = span.traceparent
        if span.sampled:
            recording.span = span

    def close(self, recording: Recording) -> None:
        recording.ended = time.monotonic()
        self.ring.close(recording)
        if self._spans is not None and recording.span is not None:
            self._spans.later(partial(write_spans, recording, self._model()))

    def end(self) -> None:
        """Send the remaining spans."""
        if self._spans is not None:
            self._spans.close()


def _all(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> list[str]:
    return [value.decode("latin-1") for each, value in headers if each == name]


def header_of(recording: Recording) -> tuple[bytes, bytes]:
    """Return the record so far as a header."""
    return ASKED, short(recording, time.monotonic())


def comment_of(recording: Recording) -> bytes:
    """Return the record so far as a comment in a stream of events."""
    return b": timeline " + short(recording, time.monotonic()) + b"\n\n"
