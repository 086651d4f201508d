"""What a run asks and what it breaks: pure functions of a seed, so that a seed is a run.

Faults are placed by the number of the request at whose turn they strike, not by the clock: a
faster or busier machine meets the same ones among the same requests.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

TEXT = """the of and to in is that it was for on are as with his they at be this from have or by
one had not but what all were when we there can an your which their said if do will each about how
up out them then she many some so these would other into has more her two like him see time"""
WORDS = TEXT.split()
STOPS = ("e", "an", " of", "zq")
PREFIXES = 24
"""Beginnings that prompts share; also of different lengths, so that blocks are shared in part."""
LONGEST_PREFIX, LONGEST_REST = 220, 60
"""Words."""
LONGEST_PULLED = 600
"""As LONGEST_PREFIX, where it takes so long to compute that pulling it is worth while."""
SHARE_OF_CANCELS = 0.15
KV = "kv"
"""The frame that says where KV of a pull lies: there a bit is flipped."""


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked; equal questions have equal answers, whatever happens meanwhile."""

    prompt: str
    max_tokens: int
    temperature: float
    seed: int
    n: int
    stop: str | None

    def body(self, model: str, *, stream: bool) -> dict[str, object]:
        body: dict[str, object] = {
            "model": model,
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            "n": self.n,
            "stream": stream,
        }
        return body if self.stop is None else {**body, "stop": [self.stop]}


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: a question, how it is asked, and whether its client leaves."""

    number: int
    question: int
    stream: bool
    leaves_after: int | None
    """Events of the stream after which the client is gone; None stays to the end."""


class Kind(StrEnum):
    KILL = "kill"
    STOP = "stop"
    RESTART = "restart"
    DELAY = "delay"
    DROP = "drop"
    REPEAT = "repeat"
    REORDER = "reorder"
    CORRUPT = "corrupt"
    CUT = "cut"
    FLIP = "flip"
    CLOCK = "clock"
    PULL_KILL = "pull-kill"
    PULL_STOP = "pull-stop"
    PULL_FLIP = "pull-flip"
    PULL_CANCEL = "pull-cancel"
    PULL_EVICT = "pull-evict"
    PULL_CROWD = "pull-crowd"


PROCESS_KINDS = (Kind.KILL, Kind.STOP, Kind.RESTART)
LINK_KINDS = (Kind.DELAY, Kind.DROP, Kind.REPEAT, Kind.REORDER, Kind.CORRUPT, Kind.CUT)
"""Of what passes between a worker that is read from and all who read, for a while."""
PULL_KINDS = (
    *(Kind.PULL_KILL, Kind.PULL_STOP, Kind.PULL_FLIP),
    *(Kind.PULL_CANCEL, Kind.PULL_EVICT, Kind.PULL_CROWD),
)
"""Aimed at a pull that is under way: they strike while a frame of it is held (``aim.py``)."""
AGENT_KINDS = (Kind.KILL, Kind.STOP, Kind.RESTART)
"""That the agent of the node suffers as workers do."""
SECONDS_AHEAD = 100_000.0
"""Of the clock of a worker that is started anew, for each second that the fault lasts."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Strikes when request ``at`` is sent."""

    at: int
    kind: Kind
    role: str
    worker: int
    """Of those of the role; taken modulo how many there are. Of a fault that is aimed at a pull,
    the role is the frame that is held, and whose it is the pull says."""
    seconds: float
    """Until it is over: the worker runs on or is started again."""

    def __str__(self) -> str:
        whom = self.role if self.kind in PULL_KINDS else f"{self.role}-{self.worker}"
        return f"#{self.at} {self.kind} {whom} for {self.seconds:.1f} s"


@dataclass(frozen=True, slots=True)
class Schedule:
    seed: int
    questions: tuple[Question, ...]
    asks: tuple[Ask, ...]
    faults: tuple[Fault, ...]


def make_schedule(
    seed: int,
    requests: int,
    *,
    questions: int = 2000,
    every: int = 40,
    kinds: Sequence[Kind] = PROCESS_KINDS,
    workers: int = 2,
    sampled: bool = True,
    roles: Sequence[str] = ("prefill", "decode"),
    longest: float = 8.0,
    pulls: bool = False,
    moments: Sequence[str] = (),
    agents: bool = False,
) -> Schedule:
    """The run of a seed: ``requests`` over at most so many different ``questions``, and one fault
    in about ``every`` requests, of at most ``longest`` seconds. With ``pulls`` every worker is
    read from, so its links and memory are hurt, too, and prompts share longer beginnings;
    ``PULL_KINDS`` strike at frames that ``moments`` names. With ``agents`` the node's agent is
    hurt. Each part has a stream of random numbers of its own: with other faults the requests are
    the same."""
    asking, breaking = random.Random(f"asks {seed}"), random.Random(f"faults {seed}")
    longest_prefix = LONGEST_PULLED if pulls else LONGEST_PREFIX
    drawn = random.Random(f"questions {seed}")
    pool = _questions(drawn, min(questions, requests), longest_prefix, sampled)
    asks = tuple(_ask(asking, number, len(pool)) for number in range(requests))
    faults = _faults(
        breaking,
        requests,
        every,
        longest,
        [
            (kind, role, worker)
            for kind in kinds
            for role, count in _hurt_by(kind, roles, workers, moments, pulls=pulls, agents=agents)
            for worker in range(count)
        ],
    )
    return Schedule(seed, pool, asks, tuple(faults))


def _hurt_by(
    kind: Kind,
    roles: Sequence[str],
    workers: int,
    moments: Sequence[str],
    *,
    pulls: bool,
    agents: bool,
) -> list[tuple[str, int]]:
    """Of whom a kind is, and how many they are."""
    if kind is Kind.PULL_FLIP:
        return [(KV, 1)] if moments else []
    if kind in PULL_KINDS:
        return [(moment, 1) for moment in moments]
    if kind in LINK_KINDS:
        return [("link", workers * len(roles) if pulls else workers)]
    if kind is Kind.FLIP and not pulls:
        return [("prefill", workers)]
    agent = [("agent", 1)] if agents and kind in AGENT_KINDS else []
    return [*((role, workers) for role in roles), *agent]


def _questions(
    draw: random.Random, count: int, longest: int, sampled: bool
) -> tuple[Question, ...]:
    prefixes = [draw.choices(WORDS, k=draw.randint(1, longest)) for _ in range(PREFIXES)]
    found = []
    for _ in range(count):
        shared = draw.choice(prefixes)
        shared = shared[: draw.choice((len(shared), draw.randint(0, len(shared))))]
        words = [*shared, *draw.choices(WORDS, k=draw.randint(1, LONGEST_REST))]
        hot = sampled and draw.random() < 0.4
        found.append(
            Question(
                prompt=" ".join(words),
                max_tokens=draw.choice((1, 4, 8, 16, 32)),
                temperature=0.8 if hot else 0.0,
                seed=draw.randrange(1 << 31),
                n=draw.choice((2, 3)) if hot and draw.random() < 0.25 else 1,
                stop=draw.choice(STOPS) if draw.random() < 0.15 else None,
            )
        )
    return tuple(found)


def _ask(draw: random.Random, number: int, questions: int) -> Ask:
    question, stream = draw.randrange(questions), draw.random() < 0.6
    leaves = draw.randint(0, 12) if draw.random() < SHARE_OF_CANCELS else None
    return Ask(number, question, stream or leaves is not None, leaves)


def _faults(
    draw: random.Random,
    requests: int,
    every: int,
    longest: float,
    blows: Sequence[tuple[Kind, str, int]],
) -> list[Fault]:
    found: list[Fault] = []
    at = draw.randint(1, every)
    while blows and at < requests:
        found.append(Fault(at, *draw.choice(blows), draw.uniform(0.1, longest)))
        at += draw.randint(1, 2 * every - 1)
    return found
