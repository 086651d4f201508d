"""What a cut broke, by cause: from a load's attempts and from where its connections went."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from tests.e2e_cluster.attempts import Attempt, Ends


@dataclass
class Breaks:
    """Attempts of one load around one cut. Moments are of ``time.monotonic``."""

    begun: list[Attempt]
    """With a dead router when the cut came: these alone may break."""
    broken: list[Attempt]
    """Connected, and without an answer."""
    unconnected: list[Attempt]
    """No connection came about: they lost 2 s, and were tried again."""
    cut: float

    @classmethod
    def of(
        cls,
        attempts: Sequence[Attempt],
        went: Mapping[Ends, str],
        dead: Collection[str],
        *,
        cut: float,
    ) -> Breaks:
        """``went`` are addresses by the connection's ends, read when ``dead`` were dead already;
        ``cut`` is the last moment at which nobody was."""
        under_way = [
            each
            for each in attempts
            if each.ends is not None and (each.ended is None or each.ended > cut)
        ]
        return cls(
            begun=[each for each in under_way if each.ends and went.get(each.ends) in dead],
            broken=[each for each in attempts if each.problem and each.connected is not None],
            unconnected=[each for each in attempts if each.problem and each.connected is None],
            cut=cut,
        )

    @property
    def elsewhere(self) -> list[Attempt]:
        """Those that broke and should not have: not with a dead router, or asked after the cut."""
        allowed = {id(each) for each in self.begun}
        return [each for each in self.broken if id(each) not in allowed]

    def most_unconnected(self, streams: int, *, forgotten: float, every: float) -> int:
        """How many attempts may have failed to connect: each stream had one under way when the
        cut came, and began one in ``every`` seconds until the dead were ``forgotten``."""
        return streams * (1 + math.ceil((forgotten - self.cut) / every))

    def late(self, forgotten: float) -> list[Attempt]:
        """Those that could not connect though nobody named the dead any more when they began."""
        return [each for each in self.unconnected if each.began > forgotten]

    def __str__(self) -> str:
        states = Counter(each.state(self.cut) for each in self.broken)
        return (
            f"{len(self.begun)} requests were with a dead router, {len(self.broken)} broke "
            f"{dict(states)}, {len(self.elsewhere)} elsewhere; "
            f"{len(self.unconnected)} attempts did not connect"
        )
