"""A whole run against a URL: learn the answers, then ask again while things break."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, replace

from tests.chaos.faults import Aimed, Hand, Processes
from tests.chaos.judge import Report, Truth, report_of, truths_of
from tests.chaos.load import Clients
from tests.chaos.schedule import Ask, Schedule

PASSES = 2
"""Without faults, in different orders: a question whose answers differ there proves nothing."""


@dataclass(frozen=True, slots=True)
class Target:
    url: str
    model: str
    at_once: int = 12
    deadline: float = 60.0
    """Seconds; a request that has no end ``load.LATE`` after it hangs."""


async def learn(target: Target, schedule: Schedule) -> tuple[dict[int, Truth], frozenset[int]]:
    """Fault-free answers by question, and those that are no proof."""
    asks = tuple(Ask(n, n, stream=n % 2 == 0, leaves_after=None) for n in _asked(schedule))
    passes = []
    for number in range(PASSES):
        order = random.Random(number).sample(asks, len(asks))
        flip = [replace(ask, stream=ask.stream == bool(number)) for ask in order]
        async with _clients(target) as clients:
            passes.append(await clients.ask_all(flip, schedule.questions))
    return truths_of(asks, passes)


async def endure(
    target: Target,
    schedule: Schedule,
    processes: Processes,
    truths: dict[int, Truth],
    unstable: frozenset[int] = frozenset(),
    aimed: Aimed | None = None,
) -> tuple[Report, Hand]:
    """All requests while all faults strike; when it returns everything runs again."""
    async with _clients(target) as clients:
        hand = Hand(schedule.faults, processes, aimed, clients.leave)
        answers = await clients.ask_all(schedule.asks, schedule.questions, hand.sending)
    await hand.mended()
    return report_of(schedule, answers, truths, unstable, hand.struck), hand


def run(target: Target, schedule: Schedule, processes: Processes) -> tuple[Report, Hand]:

    async def both() -> tuple[Report, Hand]:
        truths, unstable = await learn(target, schedule)
        return await endure(target, schedule, processes, truths, unstable)

    return asyncio.run(both())


def _asked(schedule: Schedule) -> list[int]:
    return sorted({ask.question for ask in schedule.asks})


def _clients(target: Target) -> Clients:
    return Clients(target.url, target.model, at_once=target.at_once, deadline=target.deadline)
