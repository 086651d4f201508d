"""Sessions of coding agents, as a closed loop: a turn comes when the last was answered and thought
about.

Shapes after published figures of such traffic: 195,000 tokens of context in the median of
which a turn reuses 90 % and more, some 630 new tokens a turn, answers of 300, pauses of 5 s in
the median and 81 s at the 99th percentile, a context that is thrown away on 3 % of turns, and
sub-agents, which begin with a part of their parent's context and end after some turns. Contexts
are ``scale`` of that, and pauses ``throughput`` of theirs, so that a small fleet is filled by
sessions that its memory holds.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from bench.sim.loads import FIRST_ID, LAST_ID, Load, warm
from bench.sim.router import Seen
from bench.sim.stack import CONTEXT, Stack

CONTEXT_MEDIAN, CONTEXT_SIGMA = 195_000, 0.6
SYSTEM = 12_000
"""Tokens that all sessions begin with."""
NEW, ANSWER = 632, 300
PAUSE, PAUSE_SIGMA = 5.2, 1.18
RESET = 0.028
SPAWNS = 0.06
"""Share of turns that set sub-agents to work; two of them, that take some turns each."""
SUB_AGENTS, SUB_TURNS = 2, 4
SUB_SHARE = 0.15
"""Of its parent's context, what a sub-agent begins with."""
LEAST = 256


@dataclass(frozen=True, slots=True)
class Agents:
    """Number of sessions, their time, and their scale."""

    sessions: int
    seconds: float = 90.0
    scale: float = 1 / 24
    throughput: float = 0.25


def agents(plan: Agents, seed: int) -> Load:
    """All sessions on one stack. What they open with is sent before the time that counts, so that
    caches hold what they would in the middle of a day."""

    def run(stack: Stack) -> list[Seen]:
        start = warm(stack)
        decode_batch = _Crowd(stack, plan, start, seed)
        decode_batch.begin()
        stack.clock.run()
        if decode_batch.open:
            raise RuntimeError(f"{decode_batch.open} turns never ended")
        return decode_batch.seen

    return run


class _Crowd:
    def __init__(self, stack: Stack, plan: Agents, start: float, seed: int) -> None:
        self._stack, self._plan = stack, plan
        self._seed = seed
        self._opens = start
        self._counts = start + 2.0 * plan.sessions / 3.0
        """From here on turns count: all sessions have begun."""
        self._ends = self._counts + plan.seconds
        self._system = _ids(random.Random(seed), round(SYSTEM * plan.scale))
        self.seen: list[Seen] = []
        self.open = 0
        """Turns that were sent and have not ended."""

    def begin(self) -> None:
        """Every session's first turn, one after the other."""
        for number in range(self._plan.sessions):
            draw = random.Random(1000 * self._seed + number)  # the same session in every run
            at = self._opens + 2.0 * number / 3.0
            self._later(draw, at, self._opening(draw), turns=None)

    def _opening(self, draw: random.Random) -> list[int]:
        size = CONTEXT_MEDIAN * math.exp(draw.gauss(0.0, CONTEXT_SIGMA)) * self._plan.scale
        return self._system + _ids(draw, max(LEAST, min(round(size), CONTEXT // 2)))

    def _later(self, draw: random.Random, at: float, context: list[int], turns: int | None) -> None:
        if at >= self._ends:
            return
        self._stack.router.expect(1)

        def send() -> None:
            self._stack.router.expect(-1)
            self._turn(draw, context, turns)

        self._stack.clock.at(at, send)

    def _turn(self, draw: random.Random, context: list[int], turns: int | None) -> None:
        size = max(16, round(draw.expovariate(1.0 / NEW)))
        out = max(8, min(round(draw.expovariate(1.0 / ANSWER)), 4 * ANSWER))
        if draw.random() < RESET or len(context) + size + out > CONTEXT - 1:
            context = self._opening(draw)
        prompt = context + _ids(draw, size)
        self.open += 1

        def done(seen: Seen) -> None:
            self.open -= 1
            if seen.sent >= self._counts:
                self.seen.append(seen)
            self._goes_on(draw, prompt + seen.tokens, turns)

        self._stack.router.send(prompt, out, done, seed=draw.randrange(1 << 30))

    def _goes_on(self, draw: random.Random, context: list[int], turns: int | None) -> None:
        if turns == 1:
            return
        pause = PAUSE * math.exp(draw.gauss(0.0, PAUSE_SIGMA)) * self._plan.throughput
        now = self._stack.clock.now
        self._later(draw, now + pause, context, None if turns is None else turns - 1)
        if turns is None and draw.random() < SPAWNS:
            part = context[: max(LEAST, round(len(context) * SUB_SHARE))]
            for _ in range(SUB_AGENTS):
                own = random.Random(draw.randrange(1 << 30))
                self._later(own, now + 0.1, part, SUB_TURNS)


def _ids(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(FIRST_ID, LAST_ID) for _ in range(count)]
