"""Two workers of each role that are killed and stopped at random, under users of every kind."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field

import httpx
import pytest
from client import complete, held_after, stream
from conftest import StackMaker
from reference import rows
from stack import Stack

pytestmark = [pytest.mark.e2e, pytest.mark.nightly, pytest.mark.timeout(900)]

SECONDS = 150.0
USERS = 6
DEADLINE = 60.0
FLAGS = {
    "worker_flags": ["--max-num-batched-tokens", "256"],
    "router_flags": ["--request-timeout", f"{DEADLINE:g}"],
}


@dataclass
class Chaos:
    """Users who ask and a hand that strikes, until ``until``."""

    stack: Stack
    seed: int
    until: float = field(default_factory=lambda: time.monotonic() + SECONDS)
    seen: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    async def user(self, number: int, client: httpx.AsyncClient) -> None:
        """Ask for known answers, streamed or not; leave now and then before the end."""
        draw = random.Random(100 * self.seed + number)
        while time.monotonic() < self.until:
            row, count = draw.choice(rows()[:48]), draw.choice((4, 16, 64))
            ask = draw.choice((stream, complete))
            task = asyncio.create_task(ask(client, row.prompt, max_tokens=count))
            patience = draw.random() * 2 if draw.random() < 0.3 else None
            done, _ = await asyncio.wait([task], timeout=patience)
            if not done:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                self.seen["left"] += 1
                continue
            answer = task.result()
            if answer.error is not None:
                self.seen[f"error: {answer.error['message']}"] += 1
                continue
            missing = row.tokens[len(answer.tokens) :] if len(answer.tokens) == count else []
            verdict = row.verdict(answer.tokens + missing)
            self.seen[verdict if verdict in ("equal", "excused") else "wrong"] += 1
            if verdict not in ("equal", "excused"):
                self.wrong.append(f"{verdict}, asked for {count}")

    async def hand(self) -> None:
        """Strike one worker, or one of each role; help up again who fell."""
        draw = random.Random(self.seed)
        roles = [[n for n in self.stack.workers if n.startswith(r)] for r in ("prefill", "decode")]
        while time.monotonic() < self.until:
            await asyncio.sleep(draw.uniform(2, 8))
            struck = [draw.choice(role) for role in draw.sample(roles, draw.choice((1, 1, 2)))]
            kills = draw.random() < 0.4
            for name in struck:
                number = signal.SIGKILL if kills else signal.SIGSTOP
                await asyncio.to_thread(self.stack.signal, name, number)
            await asyncio.sleep(draw.uniform(0.5, 8))
            for name in struck:
                await asyncio.to_thread(self._help_up, name, kills)
            self.seen["killed" if kills else "stopped"] += len(struck)

    def _help_up(self, name: str, killed: bool) -> None:
        if not killed:
            self.stack.signal(name, signal.SIGCONT)
            return
        self.stack.restart(name)
        self.stack.until(self.stack.workers[name].check_ready, 60, f"{name} is not ready")


async def test_no_answer_is_wrong_and_nothing_is_left(start_stack: StackMaker) -> None:
    """Whole and right, or an error that says why; then all is free and every worker serves."""
    with start_stack(prefill=2, decode=2, **FLAGS) as stack:
        chaos = Chaos(stack, seed=2)
        async with httpx.AsyncClient(base_url=stack.url, timeout=2 * DEADLINE) as client:
            users = [chaos.user(number, client) for number in range(USERS)]
            await asyncio.gather(chaos.hand(), *users)
            print(f"\n{dict(chaos.seen)}")
            assert chaos.wrong == []
            assert await asyncio.to_thread(held_after, stack, 20.0) == {}
            for row in rows()[:48:6]:
                answer = await complete(client, row.prompt)
                assert row.verdict(answer.tokens) in ("equal", "excused"), answer
        errors = sum(count for what, count in chaos.seen.items() if what.startswith("error"))
        assert errors <= 0.02 * chaos.seen["equal"], chaos.seen
