"""The hand that breaks things: it goes by the schedule, and mends what it broke."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from tests.chaos.schedule import LINK_KINDS, PULL_KINDS, SECONDS_AHEAD, Fault, Kind


class Processes(Protocol):
    """The workers of whatever is tested. Calls may block; they come on a thread of their own."""

    def name_of(self, role: str, worker: int) -> str:
        """A worker by its number, which is taken modulo how many there are."""
        ...

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal; one that kills is waited for."""
        ...

    def disturb(self, name: str, kind: Kind, seconds: float) -> None:
        """Hurt what passes on a link (``link-number``), or flip bits in a worker's memory, for
        so long; returns at once."""
        ...

    def start(self, name: str, ahead: float = 0.0) -> None:
        """Start one that has ended, its clock so many seconds ahead of the system's. Called on the
        loop's own thread, and returns at once: a child hears of the end of the thread that started
        it."""
        ...

    def wait(self, name: str) -> None: ...


class Claims:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._down: set[str] = set()

    def take(self, name: str) -> bool:
        """Whether a worker may be hurt; it is nobody else's then until ``give``."""
        with self._lock:
            free = name not in self._down
            self._down.add(name)
        return free

    def give(self, name: str) -> None:
        with self._lock:
            self._down.discard(name)


class Aimed(Protocol):
    """Whoever strikes at pulls that are under way (``strikes.py``)."""

    async def strike(self, fault: Fault, claims: Claims, leave: Callable[[], int]) -> float | None:
        """Wait for such a pull, hurt it and mend what was hurt; when that was, on the monotonic
        clock, or None if none came. ``leave`` has all clients leave that have heard nothing."""
        ...


class Hand:
    """Strikes when ``sending`` has heard of a fault's request; one fault at a worker at a time."""

    def __init__(
        self,
        faults: Sequence[Fault],
        processes: Processes,
        aimed: Aimed | None = None,
        leave: Callable[[], int] = lambda: 0,
    ) -> None:
        """``aimed`` has those of ``PULL_KINDS``, and has clients ``leave``."""
        self.struck: dict[str, float] = {}
        """Faults by name, and when they struck."""
        self.skipped: list[str] = []
        """Those whose worker was still down with an earlier one, or whose pull did not come."""
        self._left = sorted(faults, key=lambda fault: fault.at, reverse=True)
        self._processes = processes
        self._aimed = aimed
        self._leave = leave
        self._claims = Claims()
        self._tasks: list[asyncio.Task[None]] = []

    def sending(self, number: int) -> None:
        """Request ``number`` goes out: what is due now strikes."""
        while self._left and self._left[-1].at <= number:
            fault = self._left.pop()
            if fault.kind in PULL_KINDS:
                self._tasks.append(asyncio.create_task(self._aim(fault)))
                continue
            name = self._processes.name_of(fault.role, fault.worker)
            if not self._claims.take(name):
                self.skipped.append(str(fault))
                continue
            self._tasks.append(asyncio.create_task(self._strike(fault, name)))

    async def mended(self) -> None:
        """Until everything that was broken is whole again. Raises what a fault raised."""
        await asyncio.gather(*self._tasks)

    async def _strike(self, fault: Fault, name: str) -> None:
        self.struck[str(fault)] = time.monotonic()
        await self._break(fault, name)
        self._claims.give(name)

    async def _aim(self, fault: Fault) -> None:
        assert self._aimed is not None, f"nobody aims at pulls: {fault}"
        when = await self._aimed.strike(fault, self._claims, self._leave)
        if when is None:
            self.skipped.append(str(fault))
        else:
            self.struck[str(fault)] = when

    async def _break(self, fault: Fault, name: str) -> None:
        hurt = self._processes.signal
        if fault.kind in (*LINK_KINDS, Kind.FLIP):
            self._processes.disturb(name, fault.kind, fault.seconds)
            await asyncio.sleep(fault.seconds)
        elif fault.kind is Kind.STOP:
            await asyncio.to_thread(hurt, name, signal.SIGSTOP)
            await asyncio.sleep(fault.seconds)
            await asyncio.to_thread(hurt, name, signal.SIGCONT)
        elif fault.kind in (Kind.KILL, Kind.RESTART, Kind.CLOCK):
            number = signal.SIGTERM if fault.kind is Kind.RESTART else signal.SIGKILL
            await asyncio.to_thread(hurt, name, number)
            await asyncio.sleep(fault.seconds)
            ahead = fault.seconds * SECONDS_AHEAD if fault.kind is Kind.CLOCK else 0.0
            self._processes.start(name, ahead)
            await asyncio.to_thread(self._processes.wait, name)
