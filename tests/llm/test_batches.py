"""Batches of ``LLM`` that are bad, broken off, or drawn again, over a pretended model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.engine_plan.sim import SimExecutor
from tests.llm.interrupting import Interrupted, interrupted_behind
from tests.waiting import wait_for

from tandem.llm import LLM, llm_engine
from tandem.llm.outputs import RequestOutput
from tandem.protocol.commands import CommandName
from tandem.protocol.errors import FailCause, InvalidParameter, RequestFailed
from tandem.protocol.sampling import SamplingParams
from tandem.text.chat_template import ChatOptions
from tandem.text.errors import ContextLengthExceeded

SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "block_size": 16,
    "max_num_batched_tokens": 64,
    "max_model_len": 128,
}
SHORT = {"max_tokens": 2, "ignore_eos": True}


@pytest.fixture(scope="module")
def llm(smollm2: Path) -> Iterator[LLM]:
    with LLM(str(smollm2), executor=SimExecutor(64), max_num_seqs=1, **SETTINGS) as llm:
        yield llm


def num_outputs(llm: LLM) -> int:
    return llm.engine._llm.num_outputs


def drawn(smollm2: Path, seed: int, at_once: int) -> list[tuple[int, ...]]:
    """Tokens of two batches of one run."""
    executor = SimExecutor(64)
    with LLM(str(smollm2), executor=executor, seed=seed, max_num_seqs=at_once, **SETTINGS) as llm:
        params = {"temperature": 1.0, "max_tokens": 6, "ignore_eos": True, "n": 2}
        answers = [
            *llm.generate([[5] * (n + 1) for n in range(6)], params, use_tqdm=False),
            *llm.generate([[5], [5]], SamplingParams(max_tokens=6), use_tqdm=False),
        ]
    return [tuple(each.token_ids) for answer in answers for each in answer.outputs]


@pytest.mark.full
def test_what_is_drawn_hangs_on_the_engines_seed(smollm2: Path) -> None:
    """A script draws the same in each run, whatever runs at once, and other tokens under another
    seed; requests of one run draw apart."""
    first = drawn(smollm2, 3, at_once=4)
    assert drawn(smollm2, 3, at_once=2) == first
    assert drawn(smollm2, 4, at_once=4) != first
    assert len(set(first)) == len(first)


BAD: list[tuple[Any, type[InvalidParameter]]] = [
    ([1] * 500, ContextLengthExceeded),
    ([10**9], InvalidParameter),
    ("long " * 200, ContextLengthExceeded),
    ("", InvalidParameter),
    ("\ud800", InvalidParameter),
]


@pytest.mark.parametrize(("bad", "error"), BAD)
def test_a_bad_prompt_is_seen_before_any_runs(
    llm: LLM, bad: Any, error: type[InvalidParameter]
) -> None:
    """It is named, and the batch costs nothing; texts that may be too long are among them."""
    before = num_outputs(llm)
    with pytest.raises(error, match=r"^prompt\[5\]") as caught:
        llm.generate(["good"] * 5 + [bad, "good"], SHORT, use_tqdm=False)

    assert caught.value.answers == {}
    assert num_outputs(llm) == before
    with pytest.raises(error, match=r"^prompt:"):
        llm.generate([bad], SHORT, use_tqdm=False)
    assert len(llm.generate(["good"] * 5, SHORT, use_tqdm=False)) == 5


def test_bad_parameters_of_one_are_seen_before_any_runs(llm: LLM) -> None:
    """Those that the model's vocabulary forbids, and more tokens than fit with its prompt."""
    before = num_outputs(llm)
    for given, name in (
        ({"stop_token_ids": [10**6]}, "stop_token_ids"),
        ({"max_tokens": 128}, "max_tokens"),
        ({"logprobs": 1000}, "logprobs"),
    ):
        with pytest.raises(InvalidParameter, match=f"^{name}"):
            llm.generate(["a", "b", "c"], [SHORT, SHORT, given], use_tqdm=False)
    assert num_outputs(llm) == before


def test_a_bad_chat_is_seen_before_any_runs(llm: LLM) -> None:
    before = num_outputs(llm)
    good = [{"role": "user", "content": "hi"}]
    long = [{"role": "user", "content": "hi " * 200}]
    for bad, error in (([{"role": 5}], InvalidParameter), (long, ContextLengthExceeded)):
        with pytest.raises(error, match=r"^messages\[2\]"):
            llm.chat([good, good, bad], SHORT, use_tqdm=False)
    assert num_outputs(llm) == before


def test_what_is_seen_late_brings_the_answers_until_then(llm: LLM) -> None:
    """Chats under a template of the caller's are rendered when their turn comes."""
    good = [{"role": "user", "content": "hi"}]
    long = [{"role": "user", "content": "hi " * 200}]
    chat = ChatOptions(chat_template="{{ messages[0].content }}")
    with pytest.raises(ContextLengthExceeded) as caught:
        llm.chat([good] * 5 + [long], SHORT, chat=chat, use_tqdm=False)

    assert list(caught.value.answers)[:4] == [0, 1, 2, 3]  # two are under way at a time
    assert len(caught.value.answers[3].outputs[0].token_ids) == 2
    assert not llm.engine.has_unfinished_requests


def test_ids_that_are_pooled_are_looked_at_first(llm: LLM) -> None:
    """A text when its turn comes; then the error brings the vectors until then."""
    for bad in ([1] * 500, [10**9]):
        with pytest.raises(InvalidParameter, match=r"^prompt\[5\]") as caught:
            llm.embed([[1]] * 5 + [bad])
        assert caught.value.answers == {}
    with pytest.raises(ContextLengthExceeded, match=r"^prompt\[40\]") as late:
        llm.embed(["a"] * 40 + ["long " * 150])
    assert len(late.value.answers) >= 38
    assert len(late.value.answers[0].outputs.embedding) > 0
    assert len(llm.embed([[1]])) == 1


@pytest.mark.parametrize("behind", range(1, 7))
def test_an_interrupt_leaves_nothing_behind(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, behind: int
) -> None:
    """Whenever it comes while a batch is added: no request goes on, and the next is answered."""
    with monkeypatch.context() as patched:
        patched.setattr(llm_engine, "call", interrupted_behind(behind))
        with pytest.raises(Interrupted):
            llm.generate(["a", "b"], {"max_tokens": 100, "ignore_eos": True}, use_tqdm=False)

    assert not llm.engine.has_unfinished_requests
    stats = llm.engine._call(llm.engine._llm.call(CommandName.STATS)).values
    assert stats["running"] == stats["waiting"] == 0
    assert len(llm.generate(["a", "b", "c"], SHORT, use_tqdm=False)) == 3


@pytest.mark.parametrize("error", [RequestFailed(FailCause.INTERNAL, "broken"), OSError("broken")])
def test_a_failure_brings_the_answers_until_then(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    take, steps = llm.engine.take, iter(range(3))

    def failing() -> Any:
        if next(steps, None) is None:
            raise error
        return take()

    monkeypatch.setattr(llm.engine, "take", failing)
    with pytest.raises(type(error), match="broken") as caught:
        llm.generate(["a"] * 9, SHORT, use_tqdm=False)
    assert 3 <= len(caught.value.answers) < 9  # type: ignore[attr-defined]


@pytest.mark.parametrize("ahead", [1, 4])
def test_requests_of_ones_own_go_on_beside_a_batch(llm: LLM, ahead: int) -> None:
    """Their ids are not taken, and what comes to them meanwhile is the next step's, behind however
    many batches."""
    mine = f"{int(next(llm._names)) + ahead}"  # what a batch would call one of its own
    llm.engine.add_request(mine, [5], {**SHORT, "max_tokens": 4, "output_kind": "final_only"})
    for count in (2, 4):
        answers = llm.generate([[n] for n in range(count)], SHORT, use_tqdm=False)
        assert [each.prompt_token_ids for each in answers] == [[n] for n in range(count)]
    assert llm.engine.has_unfinished_requests
    (own,) = llm.engine.step()
    assert (own.request_id, own.finished, own.prompt_token_ids) == (mine, True, [5])
    assert not llm.engine.has_unfinished_requests


def test_a_request_of_ones_own_fails_for_itself(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch beside it has all of its answers, and the next step raises what it failed with."""

    async def fails(_: Any) -> AsyncIterator[RequestOutput]:
        raise RequestFailed(FailCause.INTERNAL, "it broke")
        yield

    with monkeypatch.context() as patched:
        patched.setattr(llm.engine._llm, "stream", fails)
        llm.engine.add_request("mine", [5], SHORT)
        wait_for(lambda: not llm.engine._ready.empty())
    assert len(llm.generate(["a", "b"], SHORT, use_tqdm=False)) == 2
    with pytest.raises(RequestFailed, match="it broke"):
        llm.engine.step()
    assert not llm.engine.has_unfinished_requests


def test_batches_of_two_threads_take_turns(llm: LLM) -> None:
    with ThreadPoolExecutor(2) as threads:
        batches = [threads.submit(llm.generate, [[n]] * 3, SHORT, use_tqdm=False) for n in range(2)]
        found = [each.result(60) for each in batches]
    for n, answers in enumerate(found):
        assert [answer.prompt_token_ids for answer in answers] == [[n]] * 3


def test_a_batch_hears_that_its_engine_is_closed(smollm2: Path) -> None:
    """It waited ten minutes for what would never come, and others behind it."""
    llm = LLM(str(smollm2), executor=SimExecutor(64), **SETTINGS)
    with ThreadPoolExecutor(1) as threads:
        endless = {"max_tokens": 100, "ignore_eos": True}
        batch = threads.submit(llm.generate, [[1]] * 1000, endless, use_tqdm=False)
        wait_for(lambda: num_outputs(llm) > 0)
        llm.close()
        with pytest.raises((RequestFailed, RuntimeError), match="closed"):
            batch.result(60)
