"""Records calls to /v1, from the head to the last byte, and keeps the last records."""

from __future__ import annotations

import time
from collections.abc import Mapping

from tandem.protocol.recording import Recording, begin
from tandem.router.timeline.ring import Ring
from tandem.router.timeline.view import short

HEADER = "x-tandem-timeline"
ASKED = HEADER.encode()


class Recorder:
    """One per app, used in the loop's thread; without room for a call it records nothing."""

    def __init__(self, max_calls: int, max_bytes: int) -> None:
        self.ring = Ring(max_calls, max_bytes)

    def open(self, scope: Mapping[str, object], request_id: str, now: float) -> Recording | None:
        """A call has come; its record, if it is one that is recorded."""
        path = str(scope["path"])
        if not self.ring.max_calls or scope["method"] != "POST" or not path.startswith("/v1/"):
            return None
        recording = Recording(request_id, now, path=path)
        begin(recording)
        self.ring.open(recording)
        return recording

    def close(self, recording: Recording) -> None:
        """A call is over."""
        recording.ended = time.monotonic()
        self.ring.close(recording)


def header_of(recording: Recording) -> tuple[bytes, bytes]:
    """The record so far as a header of a whole answer."""
    return ASKED, short(recording, time.monotonic())


def comment_of(recording: Recording) -> bytes:
    """The record so far as a comment in a stream of events, which clients skip."""
    return b": timeline " + short(recording, time.monotonic()) + b"\n\n"
