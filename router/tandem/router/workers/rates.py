"""Rates from existing counters. The caller passes the time."""

from __future__ import annotations

import asyncio
import math
from collections import deque


class Naps:
    """Sleeps of one length inside a loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        self._loop = loop
        self._seconds = seconds

    async def sleep(self) -> float:
        """Sleep once; return the excess in seconds."""
        wake = self._loop.time() + self._seconds
        await asyncio.sleep(self._seconds)
        return max(0.0, self._loop.time() - wake)


MAX_SAMPLES = 16


class Window:
    """Rates of several counters over the last ``seconds``."""

    def __init__(self, seconds: float = 5.0) -> None:
        self._spacing = seconds / (MAX_SAMPLES - 1)
        self._samples: deque[tuple[float, tuple[float, ...]]] = deque(maxlen=MAX_SAMPLES)
        self._seconds = seconds

    def note(self, now: float, *counters: float) -> None:
        """Note the counters' values; too frequent samples are dropped."""
        if self._samples and now - self._samples[-1][0] < self._spacing:
            return
        self._samples.append((now, counters))
        while len(self._samples) > 2 and now - self._samples[1][0] >= self._seconds:
            self._samples.popleft()

    def differences(self) -> tuple[float, tuple[float, ...]]:
        """Return the seconds from the oldest to the latest sample, and the differences."""
        if len(self._samples) < 2:
            return 0.0, ()
        (began, before), (ended, after) = self._samples[0], self._samples[-1]
        return ended - began, tuple(max(0.0, b - a) for a, b in zip(before, after, strict=True))

    def rates(self) -> tuple[float, ...]:
        """Return each rate per second; () with less than two samples."""
        seconds, differences = self.differences()
        return tuple(each / seconds for each in differences) if seconds > 0 else ()


class DecayedRate:
    """Rate of rare events; older events weigh less."""

    def __init__(self, seconds: float = 5.0) -> None:
        self._seconds = seconds
        self._value = 0.0
        self._at = 0.0

    def note(self, amount: float, now: float) -> None:
        self._value = self.read(now) + amount / self._seconds
        self._at = now

    def read(self, now: float) -> float:
        return self._value * math.exp(-max(0.0, now - self._at) / self._seconds)
