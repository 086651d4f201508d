"""Whether a worker still lives, judged by what it said and when. Pure: the caller has the clock.

Silence is death; so are beats whose counters stand still although work is pending.
"""

from __future__ import annotations

from dataclasses import dataclass

from tandem.protocol.messages import Beat


@dataclass(frozen=True, slots=True)
class LinkTimes:
    """Seconds."""

    beat_interval: float = 1.0
    beat_timeout: float = 5.0
    """Silence, or no answer to HELLO, for this long ends the link."""
    stall_timeout: float = 120.0
    """No progress with work pending for this long ends it too."""


class Liveness:
    """Clocks of one link."""

    def __init__(self, times: LinkTimes) -> None:
        self._times = times
        self.restart(0.0)

    def restart(self, now: float) -> None:
        """A link begins."""
        self._heard = now
        self._beat_at = now
        self._moved = now
        self._last = Beat()

    def overslept(self, seconds: float) -> None:
        """The judge itself stood still for so long: what came meanwhile was not read yet, and
        that time is nobody's silence."""
        self._heard += seconds
        self._moved += seconds

    def heard(self, now: float) -> None:
        """A frame came."""
        self._heard = now

    def progress(self, now: float, beat: Beat) -> None:
        """A beat came: compare its counters with the one before."""
        last, self._last = self._last, beat
        still = (beat.engine_step, beat.transfer_progress) == (
            last.engine_step,
            last.transfer_progress,
        )
        if not (still and beat.has_work):
            self._moved = now

    def overdue(self, now: float, *, greeting: bool = False) -> str | None:
        """Why the link is to be given up, or None."""
        if now - self._heard > self._times.beat_timeout:
            silent = "no answer to HELLO" if greeting else "silent"
            return f"{silent} for {self._times.beat_timeout:g} s"
        if now - self._moved > self._times.stall_timeout:
            if self._last.has_work:
                return f"no progress for {self._times.stall_timeout:g} s with work pending"
            self._moved = now
        return None

    def beat_due(self, now: float) -> bool:
        """Whether it is time for our own beat; answers True once per interval."""
        if now - self._beat_at < self._times.beat_interval:
            return False
        self._beat_at = now
        return True
