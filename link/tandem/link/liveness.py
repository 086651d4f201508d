"""Liveness of the other end of a link, judged by its frames and their times.

The caller passes the time, in seconds. A silent peer counts as dead; so does a peer whose beat
counters stand still although work is pending.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tandem.protocol.messages import Beat


@dataclass(frozen=True, slots=True)
class LinkTimes:
    """Timeouts of a link, in seconds."""

    beat_interval: float = 1.0
    beat_timeout: float = 5.0
    """Silence after which the link ends."""
    stall_timeout: float = 120.0
    """Time without progress of pending work after which the link ends."""
    greet_timeout: float | None = None
    """Time without an answer to HELLO after which the link ends; None is ``beat_timeout``."""


class Liveness:
    """Clocks of one link."""

    __slots__ = ("_last", "_moved", "_received_at", "_times")

    def __init__(self, times: LinkTimes, now: float = 0.0) -> None:
        self._times = times
        self.restart(now)

    def restart(self, now: float) -> None:
        self._received_at = now
        self._moved = now
        self._last = Beat()

    def overslept(self, seconds: float) -> None:
        """Exclude a stall of the caller from the peer's silence."""
        self._received_at += seconds
        self._moved += seconds

    def received(self, now: float) -> None:
        self._received_at = now

    def progress(self, now: float, beat: Beat) -> None:
        """Record a beat, and compare its counters with the previous ones."""
        last, self._last = self._last, beat
        still = (beat.engine_step, beat.transfers) == (last.engine_step, last.transfers)
        if not (still and beat.has_work):
            self._moved = now

    def overdue(self, now: float, *, greeting: bool = False) -> str | None:
        """Return the reason to end the link, or None. ``greeting``: HELLO is not answered yet."""
        times = self._times
        limit = times.beat_timeout
        if greeting and times.greet_timeout is not None:
            limit = times.greet_timeout
        if now - self._received_at > limit:
            return f"{'no answer to HELLO' if greeting else 'silent'} for {limit:g} s"
        if now - self._moved > times.stall_timeout:
            if self._last.has_work:
                return f"no progress for {times.stall_timeout:g} s with work pending"
            self._moved = now
        return None


class Pulse:
    """Schedule of a thread's beats, and the delay of each."""

    __slots__ = ("_seconds", "next")

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.next = -math.inf

    def hasten(self) -> None:
        """Make the next beat due at once. Thread-safe."""
        self.next = -math.inf

    def late(self, now: float) -> float | None:
        """Return None before the beat is due; then, once, its delay in seconds.

        The next beat is counted from now: missed beats are not sent later.
        """
        if now < self.next:
            return None
        late = now - self.next if self.next > -math.inf else 0.0
        self.next = now + self._seconds
        return late
