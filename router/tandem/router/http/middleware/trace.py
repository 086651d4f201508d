"""Gives every request an id, echoes it, counts the answer, and logs a line if that is enabled."""

from __future__ import annotations

import logging
import os
import time
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tandem.router.metrics import RouterMetrics
from tandem.router.observe.timeline.recorder import ASKED, Recorder, header_of

logger = logging.getLogger("tandem.access")
_SAFE = "/:@!$&'()*+,;=~"
"""Characters that a path may have in a log line, other than letters, digits and -._ : its server
has decoded it, and a client's line break or escape would be another line, or a terminal's
command."""


MAX_REQUEST_ID = 256


def is_request_id(value: str) -> bool:
    """Return whether an id may be echoed and logged."""
    return 0 < len(value) <= MAX_REQUEST_ID and value.isascii() and value.isprintable()


def _given_id(scope: Scope) -> str | None:
    """Return the client's own id, if it may be echoed."""
    given: bytes = dict(scope["headers"]).get(b"x-request-id", b"")
    text = given.decode("latin-1")
    return text if is_request_id(text) else None


def _template(scope: Scope, default: str) -> str:
    """Return the template of the route, never the client's own path, so that names are bounded."""
    template: str = getattr(scope.get("route"), "path", default)
    return template


class Trace:
    """The outermost layer: sees what every other layer answers."""

    def __init__(
        self,
        app: ASGIApp,
        metrics: RouterMetrics,
        *,
        log: bool = False,
        recorder: Recorder | None = None,
    ) -> None:
        self._app = app
        self._recorder = recorder
        self._metrics = metrics
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run as an ASGI application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        state["request_id"] = _given_id(scope) or os.urandom(16).hex()
        state["arrived"] = started = time.monotonic()
        state["send_part"] = send
        recording = None
        if self._recorder is not None:
            recording = self._recorder.open(scope, state["request_id"], started)
        state["recording"] = recording
        wants = recording is not None and dict(scope["headers"]).get(ASKED) == b"1"
        state["wants_timeline"] = wants

        async def answered(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [*message["headers"], (b"x-request-id", state["request_id"].encode())]
                if ignored := state.get("ignored"):
                    headers.append((b"x-tandem-ignored", ", ".join(ignored).encode()))
                    self._metrics.hints_ignored(ignored)
                if recording is not None:
                    recording.request_id = state["request_id"]
                    recording.status = message["status"]
                    if wants and not state.get("streams"):
                        headers.append(header_of(recording))
                message = {**message, "headers": headers}
                self._answered(scope, message["status"], started)
            await send(message)

        try:
            await self._app(scope, receive, answered)
        finally:
            del state["send_part"]  # leads to the scope that has it
            if recording is not None and self._recorder is not None:
                recording.route = _template(scope, "")
                self._recorder.close(recording)

    def _answered(self, scope: Scope, status: int, started: float) -> None:
        if scope["state"].get("route") is not None:
            return
        self._metrics.http_answered(_template(scope, "none"), status)
        if self._log:
            logger.info(
                "%s %s %d %.1f ms",
                scope["method"],
                quote(scope["path"], safe=_SAFE, errors="replace"),
                status,
                (time.monotonic() - started) * 1000,
            )
