"""Requests that make workers pull: a long beginning that one worker computes, then many at once
that share it, more than that worker has seats for.

What they answer while a pull is hurt is compared with what the same questions give afterwards, when
all is whole and every cache was emptied.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, replace

import httpx
from tests.chaos.judge import Truth, Verdict, judge
from tests.chaos.load import Answer, Clients
from tests.chaos.schedule import WORDS, Ask, Question

SHARED_WORDS, OWN_WORDS = 800, 6
AT_ONCE = 12
"""Seats of three workers."""
TOKENS = 24
FIRST = 1_000_000
"""Number of the first; those of a schedule are smaller."""


@dataclass(slots=True)
class Bait:
    """One request, and what came of it."""

    question: Question
    ask: Ask
    fault: str
    answer: Answer


class Baits:
    def __init__(self, clients: Clients, url: str) -> None:
        """``clients`` of these requests alone; ``url`` of the router."""
        self.verdicts: Counter[Verdict] = Counter()
        self._clients = clients
        self._url = url
        self._asked: list[Bait] = []

    async def ask(self, fault: str) -> None:
        """Lay out the baits of a fault, which are its own."""
        draw = random.Random(f"bait {fault}")
        shared = " ".join(draw.choices(WORDS, k=SHARED_WORDS))
        await self._ask(_question(draw, shared, 1), fault)
        tails = [" ".join(draw.choices(WORDS, k=OWN_WORDS)) for _ in range(AT_ONCE)]
        questions = [_question(draw, f"{shared} {tail}", TOKENS) for tail in tails]
        await asyncio.gather(*(self._ask(each, fault) for each in questions))

    def leave(self) -> int:
        """Clients that have heard nothing yet go away."""
        return self._clients.leave()

    async def judge(self) -> list[str]:
        """Problems, when nothing is hurt any more: what was asked is asked again."""
        problems: list[str] = []
        async with httpx.AsyncClient(base_url=self._url, timeout=60.0) as http:
            emptied = await http.post("/reset_prefix_cache")
        if emptied.status_code != 200:
            problems.append(f"caches cannot be emptied: {emptied.text}")
        gate = asyncio.Semaphore(AT_ONCE)

        async def again(bait: Bait) -> None:
            async with gate:
                verdict = await self._verdict(bait)
            self.verdicts[verdict] += 1
            if not verdict.fine:
                problems.append(f"a bait of {bait.fault} ({verdict}): {bait.answer}")

        await asyncio.gather(*(again(each) for each in self._asked))
        return problems

    def __str__(self) -> str:
        said = ", ".join(f"{count} {verdict}" for verdict, count in self.verdicts.most_common())
        return f"{self.verdicts.total()} baits: {said or 'none'}"

    async def _ask(self, question: Question, fault: str) -> None:
        ask = Ask(FIRST + len(self._asked), 0, stream=True, leaves_after=None)
        bait = Bait(question, ask, fault, Answer())
        self._asked.append(bait)
        bait.answer = await self._clients.ask(ask, question)

    async def _verdict(self, bait: Bait) -> Verdict:
        """Twice, where the first disagrees: a near-tie that rounding decides is left out."""
        verdict = Verdict.UNSTABLE
        for number in (1, 2):
            ask = replace(bait.ask, number=bait.ask.number + number * FIRST)
            truth = await self._clients.ask(ask, bait.question)
            whole = truth.status == 200 and None not in truth.finishes
            assert whole, f"without faults, {bait.question} gave {truth}"
            verdict = judge(bait.answer, Truth(tuple(truth.texts), tuple(truth.finishes)))
            if verdict is not Verdict.WRONG:
                return verdict if number == 1 else Verdict.UNSTABLE
        return verdict


def _question(draw: random.Random, prompt: str, max_tokens: int) -> Question:
    return Question(prompt, max_tokens, 0.0, draw.randrange(1 << 31), 1, None)
