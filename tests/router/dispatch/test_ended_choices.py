"""Choices whose end their reader finds, by a stop string, while others go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import aclosing

from msgspec import structs
from tests.router.behaviours import ANSWER, Make, die, wait_to
from tests.router.builders import BUSY, Stack, beats, make_request, tokens_of
from tests.router.fake_worker import Behaviour, Turn, serve_well
from tests.router.http_server import Served
from tests.waiting import until

from tandem.protocol.context import RequestContext
from tandem.protocol.outputs import EngineCoreOutput
from tandem.router.dispatch.dispatcher import Dispatcher


def is_told(turn: Turn) -> bool:
    return bool(turn.worker.ended)


def dies_later(dispatcher: Callable[[], Dispatcher]) -> Behaviour:
    """Two choices go on for a while, whatever is said of the first one behind its second token, and
    with them the worker ends."""

    def is_heard(_: Turn) -> bool:
        return any(job.ledger.length(1) == 6 for job in list(dispatcher().jobs))

    def behaviour(turn: Turn) -> Iterator[float]:
        turn.accept()
        for position in range(6):
            for choice in range(2):
                turn.token(position, choice=choice)
            if position == 1:
                yield from wait_to(turn, is_told)
        yield from die(turn, is_heard)

    return behaviour


def waits_to_be_told(turn: Turn) -> Iterator[float]:
    """Well, and behind the first token no further before the router ends a choice."""
    steps = serve_well(turn)
    for _ in range(3):  # accepted, the prefill worker's turn, the token
        yield next(steps)
    yield from wait_to(turn, is_told)
    yield from steps


async def ended_after(stack: Stack, count: int) -> list[EngineCoreOutput]:
    """Both choices of a request, whose first one is at its end behind ``count`` tokens."""
    context, outputs = RequestContext(ended=[]), list[EngineCoreOutput]()
    async with aclosing(stack.stream(make_request(n=2), context)) as read:
        async for output in read:
            outputs.append(output)
            assert context.ended == []
            if output.choice == 0 and output.position == count - 1:
                context.ended.append(0)
    return outputs


async def test_no_further_attempt_goes_on_with_it(stack: Stack, decode: Make) -> None:
    """What is still said of it is nothing, and no fault of who says it."""
    d1, d2 = decode(behaviour=dies_later(lambda: stack.dispatcher)), decode()
    await stack.find(d1, d2)
    d2.load = BUSY
    await beats(stack, d2)
    outputs = await ended_after(stack, 2)
    assert tokens_of(outputs, 0) == ANSWER[:2]
    assert tokens_of(outputs, 1) == [each + 1 for each in ANSWER]
    (ended,) = d1.ended
    assert ended.choices == (0,)
    (resumed,) = d2.submitted
    assert resumed.finished_choices == (0,)
    assert [len(each) for each in resumed.emitted] == [2, 6]


async def test_a_worker_that_knows_no_ends_of_choices_is_told_of_none(
    stack: Stack, decode: Make
) -> None:
    """It would drop the others, too."""
    d = decode()
    d.card = structs.replace(d.card, ends_choices=False)
    await stack.find(d)
    outputs = await ended_after(stack, 2)
    assert [len(tokens_of(outputs, choice)) for choice in range(2)] == [2, 8]
    assert d.ended == []
    assert d.cancelled == []  # it has said the ends of both


async def test_only_who_decodes_is_told(stack: Stack, prefill: Make, decode: Make) -> None:
    """Of a hand-off the decode worker, which may wait for the KV still."""
    p, d = prefill(), decode(behaviour=waits_to_be_told)
    await stack.find(p, d)
    outputs = await ended_after(stack, 1)
    assert [len(tokens_of(outputs, choice)) for choice in range(2)] == [1, 8]
    (ended,) = d.ended
    assert ended.choices == (0,)
    assert p.ended == []


async def test_the_last_one_ends_the_attempt_and_who_may_go_on_is_cancelled(
    stack: Stack, decode: Make
) -> None:
    """Its worker has not said that it is through with the other."""

    def other_is_quicker(turn: Turn) -> Iterator[float]:
        turn.accept()
        turn.token(0, choice=0)
        for position in range(8):
            turn.token(position, choice=1)
        yield 60.0

    d = decode(behaviour=other_is_quicker)
    await stack.find(d)
    assert len(await ended_after(stack, 1)) == 9
    await until(lambda: d.cancelled)
    assert stack.admission.num_running == 0


def test_a_stop_string_ends_it(serve: Callable[..., Served], decode: Make) -> None:
    """From the words of a client down to the next attempt's request."""
    d1, d2 = decode(), decode()
    served = serve(d1, d2)
    body = {"model": "fake", "prompt": "word", "n": 2, "max_tokens": 8, "temperature": 0.0}

    def texts(**more: object) -> list[str]:
        answer = served.post("/v1/completions", json={**body, **more}).json()
        return [each["text"] for each in answer["choices"]]

    first, second = texts()
    dies = dies_later(lambda: served.app.state.router.dispatcher)
    d1.behaviour = d2.behaviour = lambda turn: (
        serve_well(turn) if turn.request.key.attempt else dies(turn)
    )
    assert texts(stop=[first[:2]]) == ["", second]
    assert {each.finished_choices for each in (*d1.submitted, *d2.submitted)} == {(), (0,)}
