"""How long KV takes over each of P's links: from the slot of a part to D's word that it is read.

Parts are ahead of each other, so that a single one's time tells little. What is measured is a
stretch in which some part of a link was on its way: the tokens that D took in it, and its seconds.
Waits for slots at either end, packing and D's reads count; computing does not, as a part begins
when its KV is there. Lives in P's transfer thread, and is read by the engine's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import combinations
from statistics import median
from typing import NamedTuple

from tandem.protocol.ids import Incarnation
from tandem.protocol.kv import LinkTimes

KEPT = 9
"""Stretches of a link that count: five tell that it has become another."""
LEAST_BYTES = 1 << 20
"""Of a stretch: fewer show how quick messages are, not bytes."""
LONGEST_SECONDS = 0.5
"""After which a stretch is counted though parts are still on their way."""
WIDE = 2.0
"""By what factor sizes of stretches must differ to tell what is paid once of what each token
takes."""


class Stretch(NamedTuple):
    """Tokens whose KV D took while the link was never idle."""

    tokens: float
    seconds: float


def fitted(stretches: Sequence[Stretch]) -> LinkTimes:
    """Seconds of a token and of a chunk by the medians of slopes and rests over all pairs (Theil,
    1950; Sen, 1968), which a third of strays does not move. Where sizes are alike, or longer
    stretches took no longer, all is put down to the tokens."""
    sizes = [each.tokens for each in stretches]
    if max(sizes) >= WIDE * min(sizes):
        pairs = combinations(stretches, 2)
        slopes = [
            (b.seconds - a.seconds) / (b.tokens - a.tokens)
            for a, b in pairs
            if max(a.tokens, b.tokens) >= WIDE * min(a.tokens, b.tokens)
        ]
        slope = median(slopes)
        rest = median(each.seconds - slope * each.tokens for each in stretches)
        if slope > 0 and rest >= 0:
            return LinkTimes(chunk_s=rest, token_s=slope)
    return LinkTimes(chunk_s=0.0, token_s=median(each.seconds / each.tokens for each in stretches))


class _Link:
    """One consumer's."""

    __slots__ = ("began", "nbytes", "stretches", "tokens")

    def __init__(self) -> None:
        self.began = 0.0
        self.tokens = 0.0
        self.nbytes = 0
        self.stretches: deque[Stretch] = deque(maxlen=KEPT)

    def begin(self, now: float) -> None:
        self.began, self.tokens, self.nbytes = now, 0.0, 0

    def end(self, now: float) -> None:
        if self.nbytes >= LEAST_BYTES and now > self.began:
            self.stretches.append(Stretch(self.tokens, now - self.began))


class Takes:
    """Fed by the mover; ``now`` is seconds of a clock that goes on evenly."""

    def __init__(self) -> None:
        self._links: dict[Incarnation, _Link] = {}
        self._busy: set[Incarnation] = set()
        """Peers that hold slots."""

    def begun(self, peer: Incarnation, now: float) -> None:
        """A part has its slot."""
        if peer not in self._busy:
            self._busy.add(peer)
            self._links.setdefault(peer, _Link()).begin(now)

    def taken(
        self, peer: Incarnation, tokens: float, nbytes: int, now: float, *, held: int
    ) -> None:
        """The peer has read a part of so many tokens; it holds ``held`` slots still."""
        if peer not in self._busy:
            return
        link = self._links[peer]
        link.tokens += tokens
        link.nbytes += nbytes
        if not held or now - link.began >= LONGEST_SECONDS:
            link.end(now)
            link.begin(now)
        if not held:
            self._busy.discard(peer)

    def settle(self, held_by: Callable[[Incarnation], int]) -> None:
        """Stretches whose last part was given up have ended, and do not count."""
        for peer in [each for each in self._busy if not held_by(each)]:
            self._busy.discard(peer)

    def forget(self, peer: Incarnation) -> None:
        """The link is lost: the next one may go another way."""
        self._links.pop(peer, None)
        self._busy.discard(peer)

    def times(self, peer: Incarnation) -> LinkTimes | None:
        """What was measured, or None; any thread. Fitted here: few ask, and hand-offs are many."""
        link = self._links.get(peer)
        stretches = () if link is None else tuple(link.stretches)
        return fitted(stretches) if stretches else None
