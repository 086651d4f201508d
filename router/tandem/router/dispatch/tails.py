"""Time from token 1 to the decode worker's first output in a hand-off, by link. Pure.

Only hand-offs measure it, and a link that seems slow gets none. An old time is therefore used only
for a while; else one late output would exclude the link forever. Then one hand-off is on trial.
Until it has shown its pace, other requests use the old time: the link may be slow still.
"""

from __future__ import annotations

from typing import NamedTuple

from tandem.protocol.ids import Incarnation
from tandem.router.placement.links import Pair

SHARE = 0.2
"""Weight of the latest hand-off in the mean of a link's tails."""
LASTS = 30.0
"""Seconds after a link's last hand-off for which its tails are used. Also the wait for one on
trial, which may never come to its second token."""


class Tail(NamedTuple):
    """Seconds from token 1 to the decode worker's first output."""

    mean: float
    spread: float
    """Mean difference from the mean."""
    at: float
    """Time of the last one, or of the start of one on trial."""
    on_trial: bool = False
    """True if the known times are old, and the next replaces them."""


class Tails:
    """Tails per (prefill, decode) pair, dropped with either; the caller has the clock."""

    def __init__(self) -> None:
        self._tails: dict[Pair, Tail] = {}

    def note(self, pair: Pair, seconds: float, now: float) -> None:
        """Record the seconds from token 1 to a hand-off's first output of the decode worker."""
        known = self.of(pair, now)
        if known is None or known.on_trial:
            known = Tail(seconds, 0.0, now)
        spread = known.spread + SHARE * (abs(seconds - known.mean) - known.spread)
        self._tails[pair] = Tail(known.mean + SHARE * (seconds - known.mean), spread, now)

    def sent(self, pair: Pair, now: float) -> None:
        """Note a hand-off that begins over the link: if the known times are old, it is on trial."""
        known = self._tails.get(pair)
        if known is not None and now - known.at > LASTS:
            self._tails[pair] = known._replace(at=now, on_trial=True)

    def of(self, pair: Pair, now: float) -> Tail | None:
        """Return the link's tail; None without recent hand-offs, or if it is time for a trial."""
        known = self._tails.get(pair)
        return None if known is None or now - known.at > LASTS else known

    def forget(self, worker: Incarnation) -> None:
        """Drop the links of a worker that is gone."""
        for pair in [pair for pair in self._tails if worker in pair]:
            del self._tails[pair]
