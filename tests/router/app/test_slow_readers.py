"""Clients that do not read: their workers finish, others get the room, and memory has a bound."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import closing
from typing import Any, cast

import pytest
from tests.router.builders import Stack, make_request, tokens_of
from tests.router.fake_worker import FakeWorker, Turn
from tests.router.http_server import Served
from tests.waiting import until, wait_for

from tandem.protocol.outputs import EngineCoreOutput, FinishReason
from tandem.router.dispatch.retry_policy import ReaderTooSlow

Make = Callable[..., FakeWorker]
Serve = Callable[..., Served]


def babble(turn: Turn) -> Iterator[float]:
    """Tokens as fast as they go, until the request has enough."""
    turn.accept()
    for position in range(100_000):
        ends = [turn.token(position, choice=c, token=65) for c in range(turn.request.params.n)]
        if all(ends):
            return
        yield 0.0


def burst(turn: Turn) -> Iterator[float]:
    """The whole answer in one frame, as real workers say all choices of a step."""
    params, answer = turn.request.params, turn.worker.answer
    assert params.max_tokens is not None
    turn.accept()
    yield 0.02
    last = params.max_tokens - 1
    turn.say(
        outputs=tuple(
            EngineCoreOutput(
                *turn.key,
                choice,
                position,
                (answer[position],),
                finish=FinishReason.LENGTH if position == last else None,
            )
            for position in range(params.max_tokens)
            for choice in range(params.n)
        )
    )


def reader(stack: Stack, **params: Any) -> AsyncGenerator[EngineCoreOutput, None]:
    """A stream that is read by hand."""
    source = stack.dispatcher.stream(make_request(**params))
    return cast("AsyncGenerator[EngineCoreOutput, None]", source)


async def test_admission_is_left_when_the_workers_are_done(decode: Make) -> None:
    """However long the client takes to read what was said; it gets all of it."""
    stack = Stack()
    d = decode(behaviour=babble)
    await stack.find(d)
    outputs = reader(stack, max_tokens=50)
    first = await anext(outputs)
    await until(lambda: stack.admission.num_running == 0)

    (worker,) = stack.pool.workers.values()
    assert (worker.num_legs, worker.leg_tokens) == (0, 0)
    rest = [each async for each in outputs]
    assert len(tokens_of([first, *rest])) == 50
    assert (stack.admission.num_running, stack.admission.running_tokens) == (0, 0)
    assert (worker.num_legs, stack.dispatcher.backlog.held) == (0, 0)
    assert not d.cancelled
    await stack.close()


async def test_too_much_that_waits_is_given_up(decode: Make) -> None:
    """The worker hears CANCEL at once, memory and admission are free; the reader is told."""
    stack = Stack(stream_backlog=20_000)
    d = decode(behaviour=babble)
    await stack.find(d)
    outputs = reader(stack, max_tokens=2_000, logprobs=5)
    await anext(outputs)
    await until(lambda: d.cancelled)

    assert stack.dispatcher.backlog.held == 0
    assert stack.admission.num_running == 0
    with pytest.raises(ReaderTooSlow):
        async for _ in outputs:
            pass
    assert len(stack.dispatcher.jobs) == 0
    assert len(d.submitted) == 1
    await stack.close()


async def test_of_all_the_largest_goes(decode: Make) -> None:
    """Whose answer waits most makes room; who reads is served to the end."""
    stack = Stack(total_backlog=60_000)
    d = decode(behaviour=babble)
    await stack.find(d)
    small = reader(stack, max_tokens=3)
    await anext(small)
    large = reader(stack, max_tokens=2_000)
    await anext(large)
    await until(lambda: d.cancelled)

    assert len([each async for each in small]) == 2
    assert len(tokens_of(await stack.run(make_request(max_tokens=200)))) == 200
    with pytest.raises(ReaderTooSlow):
        [each async for each in large]
    await stack.close()


async def test_who_reads_slowly_but_reads_gets_everything(decode: Make) -> None:
    """A single output of any size is no sign of slowness."""
    stack = Stack(stream_backlog=10)
    d = decode(step=0.02)
    await stack.find(d)
    assert len(tokens_of(await stack.run(make_request(prompt_logprobs=5, logprobs=5)))) == 8
    await stack.close()


async def test_what_comes_at_once_is_no_slowness(decode: Make) -> None:
    """A frame is handed over as a whole, before any reader has its turn: who is there gets all."""
    stack = Stack(stream_backlog=10, total_backlog=40_000)  # what is left here, not what comes
    await stack.find(decode(behaviour=burst))
    outputs = await stack.run(make_request(n=4, max_tokens=30))
    assert [len(tokens_of(outputs, choice)) for choice in range(4)] == [30] * 4
    assert stack.dispatcher.backlog.held == 0
    await stack.close()


@pytest.mark.full
def test_a_socket_that_is_not_read_is_cut(serve: Serve, decode: Make) -> None:
    """After the time for a write; with it everything that was done for it ends."""
    d = decode(behaviour=babble)
    served = serve(d, write_timeout=0.3)
    body = {"prompt": "a", "max_tokens": 1_900, "n": 16, "logprobs": 5, "stream": True}
    content = json.dumps(body).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
    with closing(socket.socket()) as wire:
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        wire.connect(served.socket.getsockname())
        wire.sendall(head % len(content) + content)
        wait_for(lambda: d.submitted)
        wait_for(lambda: d.cancelled, 30)
        dispatcher = served.app.state.router.dispatcher
        wait_for(lambda: len(dispatcher.jobs) == 0, 30)
        assert dispatcher.backlog.held == 0
        assert dispatcher.admission.num_running == 0
        assert served.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).is_success
