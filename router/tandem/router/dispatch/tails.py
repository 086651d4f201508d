"""How long after the first token a hand-off's decode worker speaks, by link. Pure.

Only hand-offs tell, and a link that seems slow gets none: what it once took is believed for a while
only, or one late word would keep all prompts from it for ever. Then one is on trial over it, and
what it once took is believed for others until that one has shown its pace: it may be slow still.
"""

from __future__ import annotations

from typing import NamedTuple

from tandem.protocol.ids import Incarnation
from tandem.router.placement.links import Pair

SHARE = 0.2
"""Weight of the latest hand-off in the mean of a link's tails."""
LASTS = 30.0
"""Seconds after a link's last hand-off for which its tails are believed; and for which one on trial
is waited for, which may never come to its second token."""


class Tail(NamedTuple):
    """Seconds from token 1 to the decode worker's first word."""

    mean: float
    spread: float
    """Mean difference from the mean."""
    at: float
    """When the last one came, or one on trial was sent."""
    on_trial: bool = False
    """Whether what is known is old, and the next to come replaces it."""


class Tails:
    """Per (prefill, decode) pair; forgotten with either incarnation. The caller has the clock."""

    def __init__(self) -> None:
        self._tails: dict[Pair, Tail] = {}

    def note(self, pair: Pair, seconds: float, now: float) -> None:
        """A hand-off's decode worker spoke so long after token 1."""
        known = self.of(pair, now)
        if known is None or known.on_trial:
            known = Tail(seconds, 0.0, now)
        spread = known.spread + SHARE * (abs(seconds - known.mean) - known.spread)
        self._tails[pair] = Tail(known.mean + SHARE * (seconds - known.mean), spread, now)

    def sent(self, pair: Pair, now: float) -> None:
        """A hand-off begins over the link: where what is known is old, it is the one on trial."""
        known = self._tails.get(pair)
        if known is not None and now - known.at > LASTS:
            self._tails[pair] = known._replace(at=now, on_trial=True)

    def of(self, pair: Pair, now: float) -> Tail | None:
        """What the link takes; None where nothing went over it lately, and where it is time for
        one to try."""
        known = self._tails.get(pair)
        return None if known is None or now - known.at > LASTS else known

    def forget(self, worker: Incarnation) -> None:
        """An end of the links is gone."""
        for pair in [pair for pair in self._tails if worker in pair]:
            del self._tails[pair]
