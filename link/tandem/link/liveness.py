"""Whether the other end of a link still lives, judged by what it said and when. Pure: the caller
has the clock, in seconds.

Silence is death; so are beats whose counters stand still although work is pending. Time in which
the judge itself stood still is nobody's silence: what came meanwhile it has not read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tandem.protocol.messages import Beat


@dataclass(frozen=True, slots=True)
class LinkTimes:
    """Seconds."""

    beat_interval: float = 1.0
    beat_timeout: float = 5.0
    """Silence for this long ends the link."""
    stall_timeout: float = 120.0
    """No progress with work pending for this long ends it too."""
    greet_timeout: float | None = None
    """So does no answer to HELLO; None is as long as silence."""


class Liveness:
    """Clocks of one link."""

    __slots__ = ("_heard", "_last", "_moved", "_times")

    def __init__(self, times: LinkTimes, now: float = 0.0) -> None:
        self._times = times
        self.restart(now)

    def restart(self, now: float) -> None:
        """A link begins."""
        self._heard = now
        self._moved = now
        self._last = Beat()

    def overslept(self, seconds: float) -> None:
        """The judge itself stood still for so long."""
        self._heard += seconds
        self._moved += seconds

    def heard(self, now: float) -> None:
        """A frame came."""
        self._heard = now

    def progress(self, now: float, beat: Beat) -> None:
        """A beat came: compare its counters with the one before."""
        last, self._last = self._last, beat
        still = (beat.engine_step, beat.transfers) == (last.engine_step, last.transfers)
        if not (still and beat.has_work):
            self._moved = now

    def overdue(self, now: float, *, greeting: bool = False) -> str | None:
        """Why the link is to be given up, or None. ``greeting``: HELLO is not answered yet."""
        times = self._times
        limit = times.beat_timeout
        if greeting and times.greet_timeout is not None:
            limit = times.greet_timeout
        if now - self._heard > limit:
            return f"{'no answer to HELLO' if greeting else 'silent'} for {limit:g} s"
        if now - self._moved > times.stall_timeout:
            if self._last.has_work:
                return f"no progress for {times.stall_timeout:g} s with work pending"
            self._moved = now
        return None


class Pulse:
    """When a thread's next beat is due, and how late it comes to it."""

    __slots__ = ("_seconds", "next")

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.next = -math.inf
        """When to beat next; the first time is at once."""

    def hasten(self) -> None:
        """Have the next beat be due at once. Any thread: who beats right now may beat once more."""
        self.next = -math.inf

    def late(self, now: float) -> float | None:
        """None before it is due; then, once, by how many seconds it is late. The next counts from
        now: what was missed is not made up for."""
        if now < self.next:
            return None
        late = now - self.next if self.next > -math.inf else 0.0
        self.next = now + self._seconds
        return late
