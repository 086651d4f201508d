"""Records calls to /v1, from the head to the last byte, and keeps the last records."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial

from starlette.types import Scope

from tandem.link.spans import Spans
from tandem.protocol.recording import Recording, begin
from tandem.protocol.tracing import traceparent_of
from tandem.router.timeline.ring import Ring
from tandem.router.timeline.traced import operation_of, write_spans
from tandem.router.timeline.view import short

HEADER = "x-tandem-timeline"
ASKED = HEADER.encode()
MAX_PATH = 256
"""Characters that a record keeps of a path; the server takes up to 64 KiB of a stranger's."""


class Recorder:
    """One per app, used in the loop's thread; without room for a call it records nothing."""

    def __init__(
        self,
        max_calls: int,
        max_bytes: int,
        *,
        spans: Spans | None = None,
        model: Callable[[], str] = lambda: "",
    ) -> None:
        """``model`` names the one that is served, for spans."""
        self.ring = Ring(max_calls, max_bytes)
        self._spans = spans
        self._model = model

    def open(self, scope: Scope, request_id: str, now: float) -> Recording | None:
        """Begin a call; return its record, or None if it is not recorded."""
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
        """Set the trace of a call: the one that it names, or, if spans are sent, a new one."""
        named = _all(headers, b"traceparent")
        given = traceparent_of(named[0]) if len(named) == 1 else ""
        recording.traceparent = given
        if self._spans is None:
            return
        state = ",".join(_all(headers, b"tracestate"))  # one list, in however many headers
        name = operation_of(recording.path)
        span = self._spans.begin(name, recording.started, given, state)
        recording.traceparent = span.traceparent
        if span.sampled:
            recording.span = span

    def close(self, recording: Recording) -> None:
        """End the record of a call."""
        recording.ended = time.monotonic()
        self.ring.close(recording)
        if self._spans is not None and recording.span is not None:
            self._spans.later(partial(write_spans, recording, self._model()))

    def end(self) -> None:
        """Send the spans that are left."""
        if self._spans is not None:
            self._spans.close()


def _all(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> list[str]:
    return [value.decode("latin-1") for each, value in headers if each == name]


def header_of(recording: Recording) -> tuple[bytes, bytes]:
    """Return the record so far as a header of a whole answer."""
    return ASKED, short(recording, time.monotonic())


def comment_of(recording: Recording) -> bytes:
    """Return the record so far as a comment in a stream of events, which clients skip."""
    return b": timeline " + short(recording, time.monotonic()) + b"\n\n"
