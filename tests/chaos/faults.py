"""The hand that breaks things: it goes by the schedule, and mends what it broke."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Sequence
from typing import Protocol

from tests.chaos.schedule import LINK_KINDS, SECONDS_AHEAD, Fault, Kind


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

    def wait(self, name: str) -> None:
        """Until one that was started serves."""
        ...


class Hand:
    """Strikes when ``sending`` has heard of a fault's request; one fault at a worker at a time."""

    def __init__(self, faults: Sequence[Fault], processes: Processes) -> None:
        self.struck: dict[str, float] = {}
        """Faults by name, and when they struck."""
        self.skipped: list[str] = []
        """Those whose worker was still down with an earlier one."""
        self._left = sorted(faults, key=lambda fault: fault.at, reverse=True)
        self._processes = processes
        self._down: set[str] = set()
        self._tasks: list[asyncio.Task[None]] = []

    def sending(self, number: int) -> None:
        """Request ``number`` goes out: what is due now strikes."""
        while self._left and self._left[-1].at <= number:
            fault = self._left.pop()
            name = self._processes.name_of(fault.role, fault.worker)
            if name in self._down:
                self.skipped.append(str(fault))
                continue
            self._down.add(name)
            self._tasks.append(asyncio.create_task(self._strike(fault, name)))

    async def mended(self) -> None:
        """Until everything that was broken is whole again. Raises what a fault raised."""
        await asyncio.gather(*self._tasks)

    async def _strike(self, fault: Fault, name: str) -> None:
        self.struck[str(fault)] = time.monotonic()
        await self._break(fault, name)
        self._down.discard(name)

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
