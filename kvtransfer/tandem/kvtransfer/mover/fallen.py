"""Which links go a worse way than one that failed on them: what somebody is to be told. Pure.

Two ends that have not met by a way miss nothing, as those of two machines in a folder. Ways of one
machine are as good as each other: by which of them KV comes is as pods are, not a fault.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass

from tandem.kvtransfer.transports.base import Transport
from tandem.protocol.ids import Incarnation

MAX_REMEMBERED = 256
"""Peers that have no link; those heard of longest ago are forgotten first."""


@dataclass(slots=True)
class _Known:
    best: int | None = None
    """Level of the best way that passed its probe."""
    wanted: str | None = None
    """The best way that failed and has not worked since."""


class Fallen:
    """What worked and failed, by peer."""

    def __init__(self, levels: Mapping[str, int], linked: Container[Incarnation]) -> None:
        """``levels`` of the transports, 0 the best; ``linked``, which changes, are the peers that
        have a link."""
        self._levels, self._linked = levels, linked
        self._peers: dict[Incarnation, _Known] = {}

    def usable(self, peer: Incarnation, connector: str) -> None:
        """Its link goes by this now."""
        known, level = self._of(peer), self._levels[connector]
        known.best = level if known.best is None else min(level, known.best)
        if known.wanted is not None and level <= self._levels[known.wanted]:
            known.wanted = None

    def failed(self, peer: Incarnation, connector: str, *, met: bool) -> None:
        """It failed between ends that ``met`` by it, or had before, or are to meet."""
        known, level = self._of(peer), self._levels[connector]
        had_met = known.best is not None and known.best <= level
        better = known.wanted is None or level <= self._levels[known.wanted]
        if (met or had_met) and better:
            known.wanted = connector

    def counts(self) -> dict[str, int]:
        """Links that stand and go a worse way, by what they want; of the worst none does."""
        worst = max(self._levels.values())
        found = {name: 0 for name, level in self._levels.items() if level < worst}
        for peer, known in self._peers.items():
            if known.wanted in found and peer in self._linked:
                found[known.wanted] += 1
        return found

    def _of(self, peer: Incarnation) -> _Known:
        known = self._peers[peer] = self._peers.pop(peer, _Known())
        gone = [each for each in self._peers if each not in self._linked]
        for each in gone[: max(0, len(gone) - MAX_REMEMBERED)]:
            del self._peers[each]
        return known


def levels_of(transports: Mapping[str, Transport]) -> dict[str, int]:
    """Of transports that are named best first."""
    found = enumerate(transports.items())
    return {name: 0 if each.traits.maps_memory else at for at, (name, each) in found}
