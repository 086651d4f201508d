"""The hit rate's ceiling: the share of the prompts' blocks that an unbounded cache would find.

Each distinct block misses once, whatever a cache holds. So of N requested blocks, D of them
distinct, 1 - D / N could be hits. D is estimated by HyperLogLog (Flajolet et al., 2007, with the
small-range correction): 16 KiB for each half of the window, 0.8 % standard error. Hashes of blocks
are uniform already. Used in the loop's thread, once a request.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable

_BITS = 14
_REGISTERS = 1 << _BITS
_ALPHA = 0.7213 / (1 + 1.079 / _REGISTERS)
_REST = 64 - _BITS
HALF_SECONDS = 12 * 3600.0
"""Seconds of one half of the window. Two halves are counted together: the last 12 to 24 hours."""


class Sketch:
    """Estimate of the number of distinct hashes."""

    def __init__(self) -> None:
        self._registers = bytearray(_REGISTERS)

    def add(self, hashes: Iterable[bytes]) -> None:
        """Take hashes of 8 uniform bytes or more."""
        registers = self._registers
        for each in hashes:
            value = int.from_bytes(each[:8], "big")
            index, rest = value >> _REST, value & ((1 << _REST) - 1)
            rank = _REST + 1 - rest.bit_length()
            if rank > registers[index]:
                registers[index] = rank

    def joined(self, other: Sketch) -> Sketch:
        """Return the sketch of the union of both."""
        found = Sketch()
        found._registers = bytearray(map(max, self._registers, other._registers))
        return found

    def count(self) -> float:
        """Return the estimate."""
        ranks = Counter(self._registers)
        raw = _ALPHA * _REGISTERS**2 / sum(n * 2.0**-rank for rank, n in ranks.items())
        empty = ranks[0]
        if raw <= 2.5 * _REGISTERS and empty:
            return _REGISTERS * math.log(_REGISTERS / empty)
        return raw


class HitCeiling:
    """Estimate of the ceiling over the prompts of the last 12 to 24 hours."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._turns_at = clock() + HALF_SECONDS
        self._now, self._before = Sketch(), Sketch()
        self._asked_now = self._asked_before = 0

    def add(self, hashes: tuple[bytes, ...]) -> None:
        """Count the full blocks of a request's prompt, once a request."""
        self._turn()
        self._now.add(hashes)
        self._asked_now += len(hashes)

    def read(self) -> float | None:
        """Return the ceiling, 0 to 1; None before any block was requested."""
        self._turn()
        asked = self._asked_now + self._asked_before
        if not asked:
            return None
        return max(0.0, 1 - self._now.joined(self._before).count() / asked)

    def _turn(self) -> None:
        now = self._clock()
        if now < self._turns_at:
            return
        fresh = now >= self._turns_at + HALF_SECONDS  # nobody asked for a whole half, or longer
        self._before, self._asked_before = (Sketch(), 0) if fresh else (self._now, self._asked_now)
        self._now, self._asked_now = Sketch(), 0
        self._turns_at = now + HALF_SECONDS
