"""The synchronous face: add, step, abort, close."""

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from queue import Empty, SimpleQueue
from typing import Any

import msgspec
import pytest
from tests.llm.engines import SECONDS, engine_over
from tests.waiting import wait_for

from tandem.llm import llm_engine
from tandem.llm.async_llm import AsyncLLM
from tandem.llm.llm_engine import LLMEngine
from tandem.llm.outputs import PooledRequestOutput
from tandem.llm.scoring import Side
from tandem.protocol.card import ModelCard
from tandem.protocol.errors import FailCause, InvalidParameter, RequestFailed
from tandem.protocol.outputs import PooledOutput
from tandem.protocol.pooling import ModelPooling
from tandem.protocol.requests import EngineCoreRequest
from tandem.text.tokenizer import Tokenizer

Make = Callable[..., Any]
FINAL = {"output_kind": "final_only"}


@pytest.fixture
def engine(tokenizer: Tokenizer, says: Make, make_client: Make) -> Iterator[LLMEngine]:
    with engine_over(make_client(says("abc")), tokenizer) as engine:
        yield engine


def drain(engine: LLMEngine) -> list[Any]:
    outputs = []
    while engine.has_unfinished_requests:
        outputs += engine.step(timeout=SECONDS)
    return outputs


def test_requests_are_stepped_to_their_end(engine: LLMEngine) -> None:
    """Several at once, prompts and chats."""
    engine.add_request("a", "hi", FINAL)
    engine.add_request("b", [1, 2], FINAL)
    engine.add_chat("c", [{"role": "user", "content": "hi"}], FINAL)

    outputs = drain(engine)

    assert sorted(output.request_id for output in outputs) == ["a", "b", "c"]
    assert {output.outputs[0].text for output in outputs} == {"abc"}
    assert engine.card.model == "tiny"


def test_deltas_come_in_order(engine: LLMEngine) -> None:
    engine.add_request("a", "hi", {"output_kind": "delta"})

    assert "".join(output.outputs[0].text for output in drain(engine)) == "abc"


def test_bad_requests_are_refused_when_added(engine: LLMEngine) -> None:
    """Nothing is left to wait for."""
    with pytest.raises(InvalidParameter, match=r"^temperature"):
        engine.add_request("a", "hi", {"temperature": 5})
    with pytest.raises(InvalidParameter, match=r"^messages"):
        engine.add_chat("a", [])

    assert not engine.has_unfinished_requests


def test_an_id_that_runs_is_refused(engine: LLMEngine) -> None:
    engine.add_request("a", "hi", FINAL)

    with pytest.raises(InvalidParameter, match=r"^request_id"):
        engine.add_request("a", "hi", FINAL)
    drain(engine)
    engine.add_request("a", "hi", FINAL)
    assert len(drain(engine)) == 1


def test_an_aborted_request_says_nothing_more(
    tokenizer: Tokenizer, says: Make, make_client: Make
) -> None:
    """Not even under an id that is used again; the engine is told."""
    client = make_client(says("abc", finish=None), hangs=True)
    with engine_over(client, tokenizer) as engine:
        engine.add_request("a", "hi", {"output_kind": "delta"})
        engine.step(timeout=SECONDS)
        engine.abort_request("a")
        engine.abort_request("unknown")

        assert not engine.has_unfinished_requests
        engine.add_request("a", "hello", {"output_kind": "delta"})
        outputs = engine.step(timeout=SECONDS)

    assert {len(output.prompt_token_ids) for output in outputs} == {5}
    assert len(client.aborted) == 2


def test_a_failure_comes_after_the_outputs_before_it(
    tokenizer: Tokenizer, says: Make, make_client: Make
) -> None:
    """Its request is over then; others go on."""
    failure = RequestFailed(FailCause.INTERNAL, "broken")
    half = says("ab", finish=None)
    client = make_client(lambda request: [*half(request), failure])
    with engine_over(client, tokenizer) as engine:
        engine.add_request("a", "hi", {"output_kind": "delta"})
        assert client.ended.wait(SECONDS)
        assert engine.card is not None  # the loop has answered, so all that was said is there

        seen = engine.step(timeout=SECONDS)
        assert "".join(output.outputs[0].text for output in seen) == "ab"
        assert engine.has_unfinished_requests
        with pytest.raises(RequestFailed, match="broken"):
            engine.step(timeout=SECONDS)
        assert not engine.has_unfinished_requests


def test_a_silent_engine_is_not_waited_for_for_ever(
    tokenizer: Tokenizer, says: Make, make_client: Make
) -> None:
    client = make_client(says("", finish=None), hangs=True)
    with engine_over(client, tokenizer) as engine:
        engine.add_request("a", "hi")
        with pytest.raises(RequestFailed, match=r"no output for 0\.05 s"):
            engine.step(timeout=0.05)

    assert client.closed == 1
    assert len(client.aborted) == 1


class Deadlines(SimpleQueue[Any]):
    """A queue of outputs whose first waits all end with nothing; during each, ``meanwhile``."""

    def __init__(self, count: int, meanwhile: Callable[[], None]) -> None:
        self.left = count
        self.meanwhile = meanwhile

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if self.left:
            self.left -= 1
            self.meanwhile()
            raise Empty
        return super().get(block, SECONDS)


def test_tokens_that_are_shown_at_the_end_are_no_silence(
    tokenizer: Tokenizer, says: Make, make_client: Make
) -> None:
    """However many deadlines pass while they come; without them, the first is the last."""
    tokens = says("abcd")
    client = make_client(tokens)
    turns = asyncio.Semaphore(0)

    async def stream(request: EngineCoreRequest, context: object) -> AsyncGenerator[Any]:
        for each in tokens(request):
            await turns.acquire()
            yield each

    client.stream = stream
    with engine_over(client, tokenizer) as engine:
        counts = iter((1, 2, 3, 4))

        def say_one() -> None:
            count = next(counts)
            engine._loop.call_soon_threadsafe(turns.release)
            wait_for(lambda: engine._llm.num_outputs == count)

        engine._ready = Deadlines(4, say_one)
        engine.add_request("a", "hi", FINAL)
        (answer,) = engine.step(timeout=SECONDS)
        assert answer.outputs[0].text == "abcd"

        engine._ready = Deadlines(1, lambda: None)
        engine.add_request("b", "hi", FINAL)
        with pytest.raises(RequestFailed, match="no output for 60 s"):
            engine.step(timeout=SECONDS)


def test_closing_twice_is_closing_once(engine: LLMEngine) -> None:
    """The context manager may follow an explicit close; the engine's thread is gone."""
    engine.close()
    left = threading.active_count()
    engine.close()
    assert threading.active_count() == left


def test_what_cannot_be_built_is_raised_at_once() -> None:
    """A model that cannot be loaded ends no later than the constructor."""

    async def make() -> AsyncLLM:
        raise InvalidParameter("model", "x", "a folder")

    with pytest.raises(InvalidParameter, match=r"^model"):
        LLMEngine(make)


def test_a_batch_that_is_pooled_ends_when_one_of_it_hangs(
    tokenizer: Tokenizer, card: ModelCard, make_client: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the words for it, and nothing of it goes on in the engine. The loop's clock goes on by
    as long as the engine may say nothing when it has answered the other one. The error has that
    one's answer."""
    pooling = msgspec.structs.replace(card, pooling=ModelPooling())

    def script(request: EngineCoreRequest) -> list[PooledOutput]:
        key = request.key
        if len(request.prompt_token_ids) == 3:
            return []
        return [PooledOutput(key.request, key.attempt, b"\0\0\x80?", 2, 0)]

    def late(output: PooledRequestOutput) -> float:
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(loop, "time", lambda: time.monotonic() + llm_engine.STEP_SECONDS)
        return output.floats[0]

    client = make_client(script, hangs=True)
    client.card = pooling
    with engine_over(client, tokenizer) as engine:
        assert [each.floats[0] for each in engine.pool([[1, 2], "hi"], None, _same, at_once=4)] == [
            1.0,
            1.0,
        ]
        with pytest.raises(RequestFailed, match="no vector for 600 s") as failed:
            engine.pool([[1, 2, 3], [1, 2]], None, late, at_once=4)
        assert failed.value.cause is FailCause.TIMEOUT
        assert failed.value.answers == {1: 1.0}
        hung = next(each for each in client.requests if len(each.prompt_token_ids) == 3)
        assert hung.key.request in client.aborted


def test_a_failure_that_nobody_saw_ends_with_its_batch(
    tokenizer: Tokenizer, says: Make, make_client: Make
) -> None:
    """An abort takes it back; what follows is answered."""
    failure, half = RequestFailed(FailCause.INTERNAL, "broken"), says("ab", finish=None)
    whole = says("abc")

    def script(request: EngineCoreRequest) -> list[Any]:
        return whole(request) if len(request.prompt_token_ids) == 3 else [*half(request), failure]

    client = make_client(script)
    with engine_over(client, tokenizer) as engine:
        engine.add_request("a", "hi", {"output_kind": "delta"})
        assert client.ended.wait(SECONDS)
        assert engine.card is not None  # the loop has answered, so all that was said is there
        engine.step(timeout=SECONDS)
        assert engine.has_unfinished_requests
        engine.abort_request("b")
        assert engine.has_unfinished_requests
        engine.abort_request("a")

        assert not engine.has_unfinished_requests
        engine.add_request("c", "hey", FINAL)
        assert [output.outputs[0].text for output in drain(engine)] == ["abc"]


@pytest.mark.parametrize("scores", [False, True])
def test_a_batch_may_take_longer_than_the_engine_may_say_nothing(
    tokenizer: Tokenizer,
    card: ModelCard,
    make_client: Make,
    monkeypatch: pytest.MonkeyPatch,
    scores: bool,
) -> None:
    """While it answers one after the other, however long the last one waits for its turn. The
    loop's clock goes on by a third of that with each answer."""
    now = time.monotonic()
    turns = asyncio.Lock()

    async def stream(request: EngineCoreRequest, context: object) -> AsyncGenerator[PooledOutput]:
        nonlocal now
        async with turns:
            monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now)
            now += llm_engine.STEP_SECONDS / 3
            for _ in range(3):  # a timer that is due rings
                await asyncio.sleep(0)
        yield PooledOutput(request.key.request, request.key.attempt, b"\0\0\x80?", 2, 0)

    client = make_client(lambda request: [])
    client.card = msgspec.structs.replace(card, pooling=ModelPooling())
    client.stream = stream
    with engine_over(client, tokenizer) as engine:
        texts = [f"text {index}" for index in range(20)]
        if scores:
            sides = Side(["a"], "text_1"), Side(texts, "text_2")
            assert len(engine.score(*sides, activation=None, at_once=16)) == 20
        else:
            assert len(engine.pool(texts, None, _same, at_once=16)) == 20


def _same(output: PooledRequestOutput) -> PooledRequestOutput:
    return output
