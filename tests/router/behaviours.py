"""How the dispatcher tests' workers misbehave, and what well-behaved ones answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tests.router.builders import Stack
from tests.router.fake_worker import FakeWorker, Turn, serve_well

from tandem.protocol.errors import FailCause, Refusal, RefusalCode
from tandem.protocol.requests import Produce
from tandem.router.dispatch.job import Ledger

Make = Callable[..., FakeWorker]
ANSWER = list(range(100, 108))
"""The tokens that ``serve_well`` gives."""
LOOK_EVERY = 0.005
MOST_LOOKS = 4_000
"""Twenty seconds and more."""


def wait_to(turn: Turn, happened: Callable[[Turn], object]) -> Iterator[float]:
    """Go on once something has happened, however late; where it never does, after ``MOST_LOOKS``,
    and the test says what is missing."""
    for _ in range(MOST_LOOKS):
        if happened(turn):
            return
        yield LOOK_EVERY


def ledgers(stack: Stack) -> list[Ledger]:
    return [job.ledger for job in list(stack.dispatcher.jobs)]


def has_read(stack: Stack, count: int = 1) -> Callable[[Turn], bool]:
    """Whether the router has so many tokens of a request, whoever said them."""
    return lambda _: any(each.num_tokens >= count for each in ledgers(stack))


def die(turn: Turn, heard: Callable[[Turn], object]) -> Iterator[float]:
    """Close every socket once the router has heard what was said: what it has not read by then is
    lost."""
    yield from wait_to(turn, heard)
    turn.worker._stop.set()


def die_after(stack: Stack, count: int) -> Callable[[Turn], Iterator[float]]:
    """Emit ``count`` tokens more than were emitted, then close every socket."""

    def behaviour(turn: Turn) -> Iterator[float]:
        turn.accept()
        start = len(turn.request.emitted_of(0))
        for position in range(start, start + count):
            turn.token(position)
        yield from die(turn, has_read(stack, start + count) if count else lambda _: True)

    return behaviour


def behind(*happened: Callable[[Turn], object]) -> Callable[[Turn], Iterator[float]]:
    """As a worker of either role would, one choice; of its tokens each of the first comes once
    something has happened, the others at the worker's pace."""

    def behaviour(turn: Turn) -> Iterator[float]:
        turn.accept()
        position = len(turn.request.emitted_of(0))
        for each in happened:
            yield from wait_to(turn, each)
            if turn.token(position) or isinstance(turn.request.kv, Produce):
                return
            position += 1
        while not turn.token(position):
            position += 1
            yield turn.worker.step

    return behaviour


def hang_after(count: int) -> Callable[[Turn], Iterator[float]]:
    """Emit ``count`` tokens of a request's first attempt, then live on and say and hear nothing."""

    def behaviour(turn: Turn) -> Iterator[float]:
        if turn.request.key.attempt:
            yield from serve_well(turn)
            return
        turn.accept()
        for position in range(count):
            turn.token(position)
        turn.worker.silent = True
        yield 0.0

    return behaviour


def refuse_with(code: RefusalCode) -> Callable[[Turn], Iterator[float]]:

    def behaviour(turn: Turn) -> Iterator[float]:
        turn.refuse(Refusal(code=code, message=f"no: {code}", param="top_k"))
        yield from ()

    return behaviour


def fail_with(cause: FailCause) -> Callable[[Turn], Iterator[float]]:

    def behaviour(turn: Turn) -> Iterator[float]:
        turn.accept()
        yield 0.0
        turn.fail(cause)

    return behaviour


def keep_quiet(turn: Turn) -> Iterator[float]:
    """Say nothing at all about the request."""
    yield 60.0
