"""Ctrl-C reaches whoever waits for an engine, and leaves nothing behind in it."""

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NoReturn

import msgspec
import pytest
from tests.llm.engines import SECONDS, engine_over
from tests.llm.interrupting import Interrupted, interrupted_behind
from tests.waiting import wait_for

from tandem.llm import llm_engine
from tandem.llm.async_llm import AsyncLLM
from tandem.llm.llm_engine import Gate, LLMEngine, call
from tandem.llm.outputs import PooledRequestOutput
from tandem.llm.scoring import Side
from tandem.protocol.card import ModelCard
from tandem.protocol.outputs import PooledOutput
from tandem.protocol.pooling import ModelPooling
from tandem.protocol.requests import EngineCoreRequest
from tandem.text.tokenizer import Tokenizer

Make = Callable[..., Any]


@pytest.fixture
def interrupt() -> Iterator[Callable[[], None]]:
    """Raise ``Interrupted`` in the main thread, wherever it waits."""

    def raise_it(*_: object) -> None:
        raise Interrupted

    main = threading.main_thread().ident
    assert main is not None
    before = signal.signal(signal.SIGUSR1, raise_it)
    yield lambda: signal.pthread_kill(main, signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("scores", [False, True])
def test_an_interrupt_ends_what_is_pooled(
    tokenizer: Tokenizer,
    card: ModelCard,
    make_client: Make,
    interrupt: Callable[[], None],
    scores: bool,
) -> None:
    """The caller is gone, so the engine has nobody to work for; it serves the next."""
    asked: list[EngineCoreRequest] = []

    def script(request: EngineCoreRequest) -> list[PooledOutput]:
        asked.append(request)
        if len(asked) == 2:
            interrupt()
        key = request.key
        answer = PooledOutput(key.request, key.attempt, b"\0\0\x80?", 2, 0)
        return [answer] if len(asked) > 2 else []

    client = make_client(script, hangs=True)
    client.card = msgspec.structs.replace(card, pooling=ModelPooling())
    with engine_over(client, tokenizer) as engine:
        sides = Side(["a"], "text_1"), Side(["b"], "text_2")
        work: Callable[[], object] = (
            partial(engine.score, *sides, activation=None, at_once=4)
            if scores
            else partial(engine.pool, ["a", "b"], None, _same, at_once=4)
        )
        with pytest.raises(Interrupted):
            work()
        wait_for(lambda: len(client.aborted) == 2)
        assert set(client.aborted) == {each.key.request for each in asked}
        assert engine.pool(["c"], None, _same, at_once=4)[0].floats[0] == 1.0


def test_an_interrupt_before_it_is_known_that_work_began_ends_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loop may take work up before who asked for it has run on."""
    real, began, ended = asyncio.run_coroutine_threadsafe, threading.Event(), threading.Event()

    async def work() -> None:
        try:
            began.set()
            await asyncio.sleep(60)
        finally:
            ended.set()

    def interrupted(*args: Any) -> NoReturn:
        real(*args)
        assert began.wait(SECONDS)
        raise Interrupted

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        with monkeypatch.context() as patched:
            patched.setattr(asyncio, "run_coroutine_threadsafe", interrupted)
            with pytest.raises(Interrupted):
                call(work(), loop, None, Gate())
        assert ended.wait(SECONDS)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(SECONDS)
        loop.close()


def test_an_interrupt_while_an_engine_is_made_ends_it(
    tokenizer: Tokenizer, says: Make, make_client: Make, interrupt: Callable[[], None]
) -> None:
    """At once for the caller, though the loop loads a model and hears nothing meanwhile; what was
    made for nobody is closed when that is over, and its thread ends."""
    client, loaded = make_client(says("abc")), threading.Event()
    loading: list[threading.Thread] = []

    async def make() -> AsyncLLM:
        loading.append(threading.current_thread())
        interrupt()
        loaded.wait(SECONDS)
        return AsyncLLM(client, tokenizer)

    try:
        with pytest.raises(Interrupted):
            LLMEngine(make)
        assert client.closed == 0
    finally:
        loaded.set()
    loading[0].join(SECONDS)
    assert not loading[0].is_alive()
    assert client.closed == 1


def test_an_interrupt_while_an_engine_is_awaited_ends_it(interrupt: Callable[[], None]) -> None:
    """Nothing was made, so nothing is closed."""
    loading: list[threading.Thread] = []

    async def make() -> AsyncLLM:
        loading.append(threading.current_thread())
        interrupt()
        await asyncio.sleep(SECONDS)
        raise AssertionError

    with pytest.raises(Interrupted):
        LLMEngine(make)
    loading[0].join(SECONDS)
    assert not loading[0].is_alive()


def test_a_request_whose_start_nobody_saw_can_be_aborted(
    tokenizer: Tokenizer, says: Make, make_client: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the moment in which the loop has begun it: the engine is told, its id is free."""
    client = make_client(says("abc", finish=None), hangs=True)
    with engine_over(client, tokenizer) as engine:
        with monkeypatch.context() as patched:
            patched.setattr(llm_engine, "call", interrupted_behind(2))  # prepared, then begun
            with pytest.raises(Interrupted):
                engine.add_request("a", "hi", {"output_kind": "delta"})
        engine.step(timeout=SECONDS)
        engine.abort_request("a")
        assert len(client.aborted) == 1
        assert not engine.has_unfinished_requests
        engine.add_request("a", "hi", {"output_kind": "delta"})
        assert engine.step(timeout=SECONDS)


def _same(output: PooledRequestOutput) -> PooledRequestOutput:
    return output
