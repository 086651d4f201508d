"""A first token whose second would be late is held back at the router, and nothing else is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from tests.router.behaviours import behind, keep_quiet, wait_to
from tests.router.builders import Stack, inc, make_request
from tests.router.fake_worker import Turn

from tandem.protocol.card import WorkerRole
from tandem.protocol.errors import DeadlinePassed, FailCause
from tandem.protocol.finish import FinishReason
from tandem.protocol.outputs import Accepted, EngineCoreOutput, Failed
from tandem.router.dispatch.attempt import Attempt, Leg
from tandem.router.placement.base import Placement
from tandem.router.placement.damage import Targets
from tandem.router.placement.forecast import Forecast, held_back
from tandem.router.placement.snapshot import Exclusions, FleetSnapshot, LinkPace, PromptFacts
from tandem.router.tenant import NO_KEYS

HOLD = 0.02
UNTIL = 0.24


class HandLoop:
    """An event loop whose time is told."""

    def __init__(self) -> None:
        self.now = 5.0
        self._calls: list[tuple[float, Callable[[], None], SimpleNamespace]] = []

    def time(self) -> float:
        """Seconds."""
        return self.now

    def call_later(self, seconds: float, then: Callable[[], None]) -> SimpleNamespace:
        """Called by ``pass_time``, unless it is cancelled."""
        timer = SimpleNamespace(cancelled=False)
        timer.cancel = lambda: setattr(timer, "cancelled", True)
        self._calls.append((self.now + seconds, then, timer))
        return timer

    def pass_time(self, seconds: float) -> None:
        """So much later."""
        self.now += seconds
        for due, then, timer in self._calls:
            if due <= self.now and not timer.cancelled:
                then()


NO_TOKENS = dict.fromkeys(
    (
        "leg_tokens",
        "leg_compute_tokens",
        "leg_prompts",
        "leg_whole_tokens",
        "leg_whole_compute_tokens",
    ),
    0,
)


def placed(hold: float) -> Placement:
    """A pair, with this forecast."""
    both = inc(2), inc(1)
    forecast = Forecast("pair", *both, 0.1, 0.03, 0.0, 0.2, hold=hold, hold_until=UNTIL)
    return Placement(*both, "", forecast)


def begun(hold: float = HOLD) -> tuple[Attempt, Leg, Leg, HandLoop]:
    """An attempt by two legs that have been accepted, which is read."""
    loop: Any = HandLoop()
    attempt = Attempt(0, placed(hold), loop)
    for is_prefill in (True, False):
        worker: Any = SimpleNamespace(num_legs=0, **NO_TOKENS)
        attempt.legs.append(Leg(attempt, worker, is_prefill=is_prefill))
        attempt.legs[-1].receive(Accepted("1", 0))
        assert attempt.pop() is not None
    return attempt, *attempt.legs, loop


def token(at: int, finish: FinishReason | None = None) -> EngineCoreOutput:
    """The ``at``-th of an answer."""
    return EngineCoreOutput("1", 0, 0, at, (7,), finish)


def read(attempt: Attempt) -> list[Leg]:
    """Whose events may be read."""
    found = []
    while (item := attempt.pop()) is not None:
        found.append(item[0])
    return found


def test_it_goes_out_with_the_second() -> None:
    """In their order; what follows is held back no more."""
    attempt, prefill, decode, loop = begun()
    prefill.receive(token(0))
    loop.pass_time(HOLD / 2)
    assert read(attempt) == []
    decode.receive(token(1))
    assert read(attempt) == [prefill, decode]
    decode.receive(token(2))
    assert read(attempt) == [decode]


def test_it_goes_out_when_its_time_is_over() -> None:
    """The second may be later still."""
    attempt, prefill, decode, loop = begun()
    prefill.receive(token(0))
    loop.pass_time(HOLD)
    assert read(attempt) == [prefill]
    decode.receive(token(1))
    assert read(attempt) == [decode]


@pytest.mark.parametrize("of", ["prefill", "decode"])
def test_bad_news_is_told_at_once(of: str) -> None:
    """What was held back goes with it."""
    attempt, prefill, decode, _ = begun()
    prefill.receive(token(0))
    leg = prefill if of == "prefill" else decode
    leg.receive(Failed("1", 0, FailCause.WORKER_LOST, "gone"))
    assert read(attempt) == [prefill, leg]


def test_an_answer_of_one_token_waits_for_nobody() -> None:
    """It has ended."""
    attempt, prefill, _, _ = begun()
    prefill.receive(token(0, FinishReason.STOP))
    assert read(attempt) == [prefill]


@pytest.mark.parametrize(
    ("came", "held"), [(UNTIL / 2, HOLD), (UNTIL - HOLD / 4, HOLD / 4), (UNTIL, 0.0)]
)
def test_a_first_token_later_than_forecast_is_held_for_less(came: float, held: float) -> None:
    """Holding it back never makes it late, when it came as late as may be."""
    attempt, prefill, _, loop = begun()
    loop.pass_time(came)
    prefill.receive(token(0))
    if held:
        loop.pass_time(held * 0.9)
        assert read(attempt) == []
        loop.pass_time(held * 0.2)
    assert read(attempt) == [prefill]


@pytest.mark.parametrize(("hold", "first"), [(0.0, "prefill"), (HOLD, "decode")])
def test_nothing_is_held_back_where_nothing_is_late(hold: float, first: str) -> None:
    """Neither without a forecast of a late second, nor where the second came first."""
    attempt, prefill, decode, _ = begun(hold)
    if first == "decode":
        decode.receive(token(1))
    prefill.receive(token(0))
    assert read(attempt)[-1] is prefill


class AlwaysPair:
    """A policy that hands over, and forecasts this."""

    def __init__(self, hold: float) -> None:
        self._hold = hold

    def place(
        self, prompt: PromptFacts, fleet: FleetSnapshot, now: float, exclusions: Exclusions
    ) -> Placement:
        """See PlacementPolicy."""
        worker, prefill = (
            next(each.incarnation for each in fleet.workers if each.role is role)
            for role in (WorkerRole.DECODE, WorkerRole.PREFILL)
        )
        forecast = Forecast("pair", worker, prefill, 0.1, 0.03, 0.0, 0.2, hold=self._hold)
        return Placement(worker, prefill, "", forecast)


def has_come(stack: Stack) -> bool:
    """Whether the first token is at the router, read or not."""
    attempts = [job.attempt for job in list(stack.dispatcher.jobs)]
    return any(leg.came_at is not None for each in attempts if each for leg in list(each.legs))


@pytest.mark.parametrize(("hold", "streams"), [(0.0, 0), (60.0, 1)])
async def test_a_client_has_both_at_once(make_worker, hold: float, streams: int) -> None:
    """Its decode worker has spoken when it reads the first token, and not where none is held; the
    time between the two is that between workers all the same."""
    stack, is_read = Stack(), threading.Event()

    def speaks_second(turn: Turn) -> Iterator[float]:
        turn.accept()
        yield from wait_to(turn, lambda _: is_read.is_set() if streams == 0 else has_come(stack))
        yield 0.6  # whatever a sweep, which may be late, takes off
        yield from behind(lambda _: True, lambda _: is_read.is_set())(turn)

    producer = make_worker(WorkerRole.PREFILL)
    consumer = make_worker(WorkerRole.DECODE, behaviour=speaks_second)
    stack.dispatcher._placing.policy = AlwaysPair(hold)
    await stack.find(producer, consumer)
    decodes = stack.pool.workers[consumer.incarnation]
    outputs = stack.stream(make_request(40))
    await anext(outputs)
    assert decodes.num_streams == streams
    is_read.set()
    assert len([output async for output in outputs])
    (told,) = stack.dispatcher.explanations.to_json(NO_KEYS)
    assert told["second_s"] > 0.1
    await stack.close()


async def test_one_that_is_held_back_goes_out_at_the_deadline(make_worker) -> None:
    """Whoever takes what there is by then takes it."""
    producer = make_worker(WorkerRole.PREFILL)
    consumer = make_worker(WorkerRole.DECODE, behaviour=keep_quiet)
    stack = Stack()
    stack.dispatcher._placing.policy = AlwaysPair(60.0)
    await stack.find(producer, consumer)
    outputs = stack.stream(make_request(40, budget_ms=1_500))
    assert (await anext(outputs)).token_ids == (100,)
    with pytest.raises(DeadlinePassed):
        await anext(outputs)
    await stack.close()


def test_how_long_is_by_how_late_the_second_mostly_comes() -> None:
    """No longer than the bound of gaps, and not so long that the first would be late."""
    targets = Targets(0.3, 0.025)
    assert held_back(LinkPace(), 0.02, 0.1, targets) == 0.0
    early = LinkPace(tail_s=0.012, tail_spread_s=0.004)
    assert held_back(early, 0.004, 0.1, targets) == 0.0
    assert held_back(early, 0.015, 0.1, targets) == pytest.approx(0.01), "its step comes behind it"
    later = LinkPace(tail_s=0.021, tail_spread_s=0.004)
    assert held_back(later, 0.006, 0.1, targets) == pytest.approx(0.01)
    assert held_back(LinkPace(tail_s=0.2, tail_spread_s=0.05), 0.006, 0.1, targets) == 0.025
    assert held_back(LinkPace(tail_s=0.2), 0.006, 0.23, targets) == pytest.approx(0.01)
    assert held_back(LinkPace(tail_s=0.2), 0.006, 0.5, targets) == 0.0


async def test_tails_have_a_mean_and_a_spread(make_worker) -> None:
    """Steady ones have none."""
    producer, consumer = make_worker(WorkerRole.PREFILL), make_worker(WorkerRole.DECODE)
    stack = Stack()
    await stack.find(producer, consumer)
    pair = (producer.incarnation, consumer.incarnation)
    for _ in range(9):
        stack.fleet.tails.note(pair, 0.02, 0.0)
    steady = stack.fleet.snapshot(0.0).paces[pair]
    assert [steady.tail_s, steady.tail_spread_s] == pytest.approx([0.02, 0.0])
    stack.fleet.tails.note(pair, 0.07, 0.0)
    later = stack.fleet.snapshot(0.0).paces[pair]
    assert [later.tail_s, later.tail_spread_s] == pytest.approx([0.03, 0.01])
    await stack.close()
