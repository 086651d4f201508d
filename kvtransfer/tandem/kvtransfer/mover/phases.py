"""Durations of the phases of D's hand-offs.

Times are recorded at once, and counted later by ``settle``, as metrics are slow on a core that has
just woken.
"""

from __future__ import annotations

import time
from collections import Counter

from tandem.kvtransfer.events import BlocksFree, Cancelled, FirstTokenEnded, Loaded, Ready
from tandem.kvtransfer.handoff.messages import Done
from tandem.kvtransfer.metrics import HandoffMetrics
from tandem.protocol.ids import RequestKey
from tandem.protocol.kv import LoadFailed
from tandem.protocol.timeline import Note

MAX_PARTS = 48
"""Parts of one hand-off that are noted; further ones only in the total."""

_OUTCOMES = {
    Loaded: "loaded",
    FirstTokenEnded: "first_token_ended",
    LoadFailed: "failed",
    Cancelled: "cancelled",
}
_STRETCHES = (
    ("wait", "open", "ready"),
    ("reserve", "ready", "want"),
    ("load", "want", "loaded"),
    ("commit", "done", "loaded"),
)
"""Notes of a whole hand-off: name, from, to."""


class Phases:
    """Times of each key's steps, until it ends."""

    def __init__(self, metrics: HandoffMetrics) -> None:
        self._metrics = metrics
        self._at: dict[RequestKey, dict[str, float]] = {}
        self._parts: dict[RequestKey, list[Note]] = {}
        self._seen: list[tuple[str, float]] = []
        """Phases and their seconds that are not counted yet, like the next two."""
        self._moved: list[int] = []
        self._outcomes: Counter[str] = Counter()

    def begin(self, key: RequestKey) -> None:
        self._at[key] = {"open": time.monotonic()}
        self._parts[key] = []

    def read(self, key: RequestKey, nbytes: int, seconds: float) -> None:
        """Record a part that was just read."""
        self._seen.append(("read", seconds))
        self._moved.append(nbytes)
        parts = self._parts.get(key)
        if parts is not None and len(parts) < MAX_PARTS:
            now = time.monotonic()
            parts.append(Note("part", now - seconds, now, nbytes))

    def unpacked(self, seconds: float) -> None:
        self._seen.append(("unpack", seconds))

    def wanted(self, key: RequestKey) -> None:
        """Record that blocks are reserved."""
        self._step(key, "want", "reserve", since="ready")

    def sent(self, message: object) -> None:
        if isinstance(message, Done) and message.ok:
            self._step(message.key, "done")

    def final(self, key: RequestKey) -> None:
        """Record FINAL of P: the prompt is done."""
        self._step(key, "final")

    def told(self, event: object) -> object:
        """Record an event for the engine; return the event, with its times if it is ``Loaded``."""
        if isinstance(event, Ready):
            self._step(event.key, "ready", "wait", since="open")
        elif isinstance(event, Loaded):
            self._step(event.key, "loaded", "commit", since="done")
            self._step(event.key, "loaded", "load", since="want")
            self._step(event.key, "loaded", "tail", since="final")
            event = Loaded(event.key, event.first, self._notes(event.key))
        if isinstance(event, Loaded | FirstTokenEnded | LoadFailed | Cancelled):
            self._at.pop(event.key, None)
            self._parts.pop(event.key, None)
            if not event.key.is_pull:  # pulls are counted by their connector
                self._outcomes[_OUTCOMES[type(event)]] += 1
        if isinstance(event, LoadFailed) and not event.key.is_pull:
            self._metrics.failures.labels("consumer", event.cause).inc()
        assert not isinstance(event, BlocksFree) or event.key not in self._at
        return event

    def settle(self) -> None:
        """Count all that has passed since the last time."""
        for phase, seconds in self._seen:
            self._metrics.phase_of(phase).observe(seconds)
        for nbytes in self._moved:
            self._metrics.moved("consumer", nbytes)
        for outcome, count in self._outcomes.items():
            self._metrics.endings_of("consumer", outcome).inc(count)
        self._seen.clear()
        self._moved.clear()
        self._outcomes.clear()

    def _notes(self, key: RequestKey) -> tuple[Note, ...]:
        at, parts = self._at.get(key, {}), self._parts.get(key, [])
        total = sum(each.amount for each in parts)
        return (
            *(
                Note(name, at[begin], at[end], total if name == "load" else 0)
                for name, begin, end in _STRETCHES
                if begin in at and end in at
            ),
            *parts,
        )

    def _step(self, key: RequestKey, name: str, phase: str = "", since: str = "") -> None:
        at = self._at.get(key)
        if at is None:
            return
        at[name] = time.monotonic()
        if since in at:
            self._seen.append((phase, at[name] - at[since]))
