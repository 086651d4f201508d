"""A whole run of a line: learn, hurt, judge, and look at what is left."""

from __future__ import annotations

import asyncio

from tests.chaos.baits import Baits
from tests.chaos.faults import Hand
from tests.chaos.judge import Report
from tests.chaos.line import NUM_BLOCKS, Line
from tests.chaos.load import Clients
from tests.chaos.run import Target, endure, learn
from tests.chaos.schedule import Schedule
from tests.chaos.strikes import Strikes


async def chased(
    target: Target, schedule: Schedule, line: Line, *, aimed: bool = False
) -> tuple[Report, Hand, list[str]]:
    """What the run came to, who struck, and what of pulls was hurt, if they were ``aimed`` at."""
    truths, unstable = await learn(target, schedule)
    line.remember()
    clients = Clients(
        target.url, target.model, at_once=2 * target.at_once, deadline=target.deadline
    )
    async with clients:
        baits = Baits(clients, target.url)
        strikes = Strikes(
            line, line, baits, url=target.url, model=target.model, num_blocks=NUM_BLOCKS
        )
        report, hand = await endure(target, schedule, line, truths, unstable, strikes)
        report.problems += await asyncio.to_thread(line.problems)
        if aimed:
            report.problems += await strikes.problems()
    return report, hand, [str(strikes)] if aimed else []
