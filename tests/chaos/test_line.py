"""The short form: a few hundred requests to two prefill and two decode workers that are hurt."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from tests.chaos.chased import chased
from tests.chaos.leaks import leaks
from tests.chaos.line import Line
from tests.chaos.raised import raised
from tests.chaos.run import Target, learn
from tests.chaos.schedule import LINK_KINDS, PROCESS_KINDS, Kind, make_schedule
from tests.waiting import wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(400)]


def assert_endured(
    line: Line,
    seed: int,
    requests: int,
    every: int,
    kinds: tuple[Kind, ...] = PROCESS_KINDS,
    longest: float = 6.0,
    questions: int = 30,
) -> None:
    schedule = make_schedule(
        seed,
        requests,
        questions=questions,
        every=every,
        longest=longest,
        kinds=kinds,
        pulls=line.pulls is not None,
    )
    target = Target(line.stack.url, "smol")
    report, hand, _ = asyncio.run(chased(target, schedule, line))
    struck = f"seed {seed}, struck {list(hand.struck)}\n"
    assert not report.problems, struck + "\n".join(report.problems)
    assert len(hand.struck) >= 3, hand.skipped


def test_hurt_workers_cost_no_token(small: Path, tmp_path: Path):
    """Kills, stops, restarts with the same clock and with another, bits that flip in a prefill
    worker's slots: nothing wrong, nothing that hangs, nothing left, nobody dead."""
    kinds = (*PROCESS_KINDS, Kind.FLIP, *((Kind.CLOCK,) if os.geteuid() == 0 else ()))
    with raised(small, tmp_path / "log", "tcp") as line:
        for _ in range(2):  # a busy machine may have looked for slots when none was written
            assert_endured(line, seed=21, requests=110, every=16, kinds=kinds)
            if any(each.flipped for each in line.flippers):
                break
        assert any(each.flipped for each in line.flippers)


def test_hurt_links_cost_no_token(small: Path, tmp_path: Path):
    """What passes between workers is lost, repeated, mixed, changed and cut: the same holds."""
    with raised(small, tmp_path / "log", "tcp", proxied=12) as line:
        assert_endured(line, seed=12, requests=120, every=8, kinds=LINK_KINDS, longest=1.5)
        hurt = [sum(each.hurt.values()) for each in line.proxies]
        assert sum(hurt) >= 5, hurt


def test_a_death_and_a_leak_are_seen(small: Path, tmp_path: Path):
    """What the line holds is looked at for real: a worker that dies of itself is named, and so is
    what a request holds that runs, and memory that a worker has mapped since."""
    with raised(small, tmp_path / "log", "tcp", workers=1) as line:
        line.remember()
        assert line.leaks() == []
        workers = line.stack.workers.values()
        less = {name: count - 1 for name, count in line.before.items()}
        assert [each for each in leaks(line.stack, workers, less) if "shared mappings" in each]
        schedule = make_schedule(1, 30, kinds=())

        async def while_busy() -> list[str]:
            target = Target(line.stack.url, "smol")
            asking = asyncio.create_task(learn(target, schedule))
            found: list[str] = []
            while not found and not asking.done():
                found = await asyncio.to_thread(line.leaks)
            await asking
            return found

        assert asyncio.run(while_busy())
        child = line.stack.workers["decode-0"]
        child.signal(signal.SIGKILL)
        wait_for(lambda: child.exit_code is not None)
        line.look()
        assert line.died == ["decode-0 ended of itself with -9"]
        line.start("decode-0")
        line.wait("decode-0")
        line.whole()


@pytest.mark.nightly
def test_pulled_prefixes_cost_no_token(small: Path, tmp_path: Path):
    """Workers that pull from each other what they have cached are killed, stopped and lose bits,
    lenders and pullers alike: the same holds, and some prefixes were pulled for all that."""
    kinds = (*PROCESS_KINDS, Kind.FLIP, Kind.FLIP)
    with raised(small, tmp_path / "log", "tcp", pulls=True) as line:
        assert_endured(line, 7, 140, every=16, kinds=kinds, longest=3.0, questions=40)
        assert sum(each.flipped for each in line.flippers) > 0
