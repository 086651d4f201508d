"""How long the phases of D's hand-offs take, seen from the messages and events that pass by."""

from __future__ import annotations

import time

from tandem.kvtransfer.events import BlocksFree, Cancelled, FirstTokenEnded, Loaded, Ready
from tandem.kvtransfer.handoff.messages import Done, Want
from tandem.kvtransfer.metrics import HandoffMetrics
from tandem.protocol.ids import RequestKey
from tandem.protocol.kv import LoadFailed

_OUTCOMES = {
    Loaded: "loaded",
    FirstTokenEnded: "first_token_ended",
    LoadFailed: "failed",
    Cancelled: "cancelled",
}


class Phases:
    """Times of each key's steps, until it ends."""

    def __init__(self, metrics: HandoffMetrics) -> None:
        self._metrics = metrics
        self._at: dict[RequestKey, dict[str, float]] = {}

    def begin(self, key: RequestKey) -> None:
        """OPEN."""
        self._at[key] = {"open": time.perf_counter()}

    def sent(self, message: object) -> None:
        """A message of D passes."""
        if isinstance(message, Want):
            self._step(message.key, "want", "reserve", since="ready")
        elif isinstance(message, Done) and message.ok:
            self._step(message.key, "done")

    def final(self, key: RequestKey) -> None:
        """P said FINAL: the prompt is done."""
        self._step(key, "final")

    def told(self, event: object) -> None:
        """An event for the engine passes."""
        if isinstance(event, Ready):
            self._step(event.key, "ready", "wait", since="open")
        elif isinstance(event, Loaded):
            self._step(event.key, "loaded", "commit", since="done")
            self._step(event.key, "loaded", "load", since="want")
            self._step(event.key, "loaded", "tail", since="final")
        if isinstance(event, Loaded | FirstTokenEnded | LoadFailed | Cancelled):
            self._at.pop(event.key, None)
            self._metrics.endings.labels("consumer", _OUTCOMES[type(event)]).inc()
        if isinstance(event, LoadFailed):
            self._metrics.failures.labels("consumer", event.cause).inc()
        assert not isinstance(event, BlocksFree) or event.key not in self._at

    def _step(self, key: RequestKey, name: str, phase: str = "", since: str = "") -> None:
        at = self._at.get(key)
        if at is None:
            return
        at[name] = time.perf_counter()
        if since in at:
            self._metrics.phase.labels(phase).observe(at[name] - at[since])
