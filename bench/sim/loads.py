"""Loads of a simulated stack: open loads with times of arrival, and sessions of agents.

Lengths and times of an open load come from the client that measures real stacks
(tandem.cli.bench.load), so that the same seed gives the same arrivals. Agents are a closed loop: a
turn comes when the one before it was answered and thought about.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.sim.router import Seen
from bench.sim.stack import CONTEXT, Stack

from tandem.cli.bench.load import Ask, LoadConfig, asks

WARMUPS = 8
SETTLE = 20.0
"""Seconds for the warm-up: what was measured then is what forecasts begin with."""
FIRST_ID, LAST_ID = 1000, 30_000

Load = Callable[[Stack], list[Seen]]
"""Runs a stack to its end; what its clients saw, without the warm-up."""


def uniform(rate: float, count: int, seed: int, tokens_in: int = 2048, out: int = 256) -> Load:
    """Prompts of one length at random times, as bench/pair/load.py sends them."""
    config = LoadConfig(
        num_prompts=count,
        request_rate=rate,
        random_input_len=tokens_in,
        random_output_len=out,
        seed=seed,
    )
    return opened(asks(config))


def alone(tokens: int, count: int = 8) -> Load:
    """Prompts one after the other, each long after the last one's end."""
    draw = random.Random(tokens)
    return opened([Ask(_ids(draw, tokens), 8, 5.0 * number) for number in range(count)])


def trace(path: Path, rate: float, count: int, seed: int) -> Load:
    """The first ``count`` requests of a recorded trace, played so that they come at ``rate``."""
    recorded = LoadConfig(
        dataset_path=str(path),
        num_prompts=count,
        max_model_len=CONTEXT,
        seed=seed,
    )
    found = asks(recorded)
    last = max(each.at or 0.0 for each in found)
    speed = rate * last / len(found)
    return opened([Ask(e.prompt, e.max_tokens, (e.at or 0.0) / speed) for e in found])


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of request in a mixed load."""

    name: str
    tokens_in: int
    out: int


KINDS = (Kind("document", 6144, 32), Kind("chat", 1024, 256), Kind("essay", 128, 640))
SHARES = ((0.5, 0.4, 0.1), (0.05, 0.45, 0.5))
"""Of the kinds, in one phase and in the other."""
PHASE = 10.0
"""Seconds of each phase."""


def mixed(rate: float, count: int, seed: int) -> Load:
    """Long prompts with short answers, chats, and short prompts with long answers, at random
    times; what most of them are changes every ten seconds."""
    draw = random.Random(seed)
    found, at = [], 0.0
    for _ in range(count):
        at += draw.expovariate(rate)
        kind = draw.choices(KINDS, SHARES[int(at / PHASE) % len(SHARES)])[0]
        length = max(16, round(kind.tokens_in * draw.uniform(0.5, 1.5)))
        out = max(4, round(kind.out * draw.uniform(0.5, 1.5)))
        found.append(Ask(_ids(draw, length), out, at))
    return opened(found)


def opened(todo: Sequence[Ask]) -> Load:
    """Requests that come at their times, whatever became of those before."""

    def run(stack: Stack) -> list[Seen]:
        seen: list[Seen] = []
        start = warm(stack)
        stack.router.expect(len(todo))
        for number, ask in enumerate(todo):

            def send(ask: Ask = ask, number: int = number) -> None:
                stack.router.expect(-1)
                stack.router.send(ask.prompt, ask.max_tokens, seen.append, seed=number)

            stack.clock.at(start + (ask.at or 0.0), send)
        stack.clock.run()
        _check(seen, len(todo))
        return seen

    return run


def warm(stack: Stack) -> float:
    """Some requests before those that count, as clients send them; when those may come."""
    draw = random.Random(0)
    for number in range(WARMUPS):

        def send(prompt: list[int], number: int = number) -> None:
            stack.router.send(prompt, 128, lambda _: None, seed=number)

        stack.clock.at(2.0, partial(send, _ids(draw, 2048)))
    stack.router.expect(1)
    stack.clock.at(SETTLE, lambda: stack.router.expect(-1))
    return SETTLE


def _check(seen: Sequence[Seen], count: int) -> None:
    if len(seen) != count:
        raise RuntimeError(f"{count - len(seen)} of {count} requests never ended")


def _ids(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(FIRST_ID, LAST_ID) for _ in range(count)]
