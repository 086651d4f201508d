"""Sleeping and waking by the offline interface, and all engines behind a client or none."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from tests.engine_plan.sim import SimExecutor

from tandem.engine.step import ModelRunnerOutput, SchedulerOutput
from tandem.llm import LLM
from tandem.llm import async_llm as module
from tandem.llm.async_llm import put_to_sleep
from tandem.protocol.commands import CommandName, Reply, SleepTag
from tandem.protocol.errors import (
    FailCause,
    InvalidParameter,
    RefusalCode,
    RequestFailed,
    RequestRefused,
    TandemError,
)

PARAMS = {"temperature": 0, "max_tokens": 5, "ignore_eos": True}


@pytest.fixture
def executor() -> SimExecutor:
    return SimExecutor(64, verify=True)


@pytest.fixture
def llm(smollm2: Path, executor: SimExecutor) -> Iterator[LLM]:
    with LLM(str(smollm2), executor=executor, device="cpu", block_size=16) as llm:
        yield llm


def answer(llm: LLM) -> Any:
    return llm.generate("hello there", PARAMS, use_tqdm=False)[0].outputs[0].token_ids


def test_a_batch_after_a_sleep_is_the_same(llm: LLM, executor: SimExecutor) -> None:
    """While it sleeps a batch is refused by name; levels and tags reach the rank."""
    before = answer(llm)
    llm.sleep(level=2)
    assert llm.is_sleeping
    with pytest.raises(RequestRefused) as refused:
        answer(llm)
    assert refused.value.refusal.code is RefusalCode.ASLEEP
    llm.wake_up(tags=["weights"])
    assert llm.is_sleeping
    llm.wake_up()
    assert not llm.is_sleeping
    assert answer(llm) == before
    assert executor.slept == [2]
    assert executor.woken == [SleepTag.WEIGHTS, SleepTag.KV_CACHE]


def test_wishes_that_are_none_are_refused_by_name(llm: LLM) -> None:
    with pytest.raises(InvalidParameter, match=r"^level: 3 is not allowed; one of 1, 2"):
        llm.sleep(level=3)
    with pytest.raises(InvalidParameter, match=r"^mode: 'keep' is not allowed; one of abort, wait"):
        llm.sleep(mode="keep")
    with pytest.raises(InvalidParameter, match=r"^timeout: 601 is not allowed"):
        llm.sleep(mode="wait", timeout=601)
    with pytest.raises(InvalidParameter, match=r"^tags: 'kv' is not allowed; some of weights"):
        llm.wake_up(tags=["kv"])
    assert not llm.is_sleeping


def test_what_runs_may_end_or_is_ended(
    llm: LLM, executor: SimExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests of one's own loop: waited for to their end, or failed."""
    execute = executor.execute

    def slowly(plan: SchedulerOutput) -> Future[ModelRunnerOutput]:
        time.sleep(0.005)
        return execute(plan)

    monkeypatch.setattr(executor, "execute", slowly)
    llm.engine.add_request("a", "hello", {**PARAMS, "max_tokens": 40})
    llm.sleep(mode="wait", timeout=30)
    outputs = []
    while llm.engine.has_unfinished_requests:
        outputs += llm.engine.step()
    assert len([token for each in outputs for token in each.outputs[0].token_ids]) >= 40
    llm.wake_up()
    llm.engine.add_request("b", "hello", {**PARAMS, "max_tokens": 900})
    llm.engine.step()
    llm.sleep()
    with pytest.raises(RequestFailed) as failed:
        drain(llm)
    assert failed.value.cause is FailCause.ASLEEP


def test_what_does_not_wake_up_says_so(llm: LLM, executor: SimExecutor) -> None:
    """It goes on sleeping, and can be woken up when the fault is gone."""
    llm.sleep()
    executor.fails_to_wake = TandemError("no room")
    with pytest.raises(RequestFailed, match=r"^weights could not be taken again: no room"):
        llm.wake_up()
    assert llm.is_sleeping
    executor.fails_to_wake = None
    llm.wake_up()
    assert answer(llm)


def drain(llm: LLM) -> None:
    """Steps to the end of all requests."""
    while llm.engine.has_unfinished_requests:
        llm.engine.step()


class Fleet:
    """Answers of several engines: how many sleep, look by look."""

    def __init__(self, *looks: int | Reply | TandemError, engines: int = 2) -> None:
        self.looks = list(looks)
        self.engines = engines
        self.asked: list[CommandName] = []

    async def __call__(self, name: CommandName, **args: str | float | bool) -> Reply:
        self.asked.append(name)
        look: int | Reply | TandemError = 0
        if name is CommandName.SLEEP:
            look = self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]
        if isinstance(look, TandemError):
            raise look
        if isinstance(look, Reply):
            return look
        values = {"engines": float(self.engines), "asleep": float(look)}
        return Reply(id=0, ok=True, values=values)


async def test_it_is_asked_until_all_sleep() -> None:
    fleet = Fleet(0, 1, 2)
    reply = await put_to_sleep(fleet, level=1, mode="wait", timeout=10)
    assert reply.ok
    assert fleet.asked == [CommandName.IS_SLEEPING, *[CommandName.SLEEP] * 3]


@pytest.mark.parametrize(
    ("look", "said"),
    [
        (Reply(id=0, ok=False, message="peers read it"), "peers read it"),
        (1, "requests did not come to their end within 0 s"),
    ],
)
async def test_all_sleep_or_none(look: int | Reply, said: str) -> None:
    """One that stays awake wakes the others."""
    fleet = Fleet(look)
    reply = await put_to_sleep(fleet, level=1, mode="wait", timeout=0)
    assert (reply.ok, reply.message) == (False, said)
    assert fleet.asked[-1] is CommandName.WAKE_UP


async def test_nobody_sleeps_where_an_engine_is_silent() -> None:
    """What it failed with is raised, behind a word to the others."""
    fleet = Fleet(RequestFailed(FailCause.TIMEOUT, "silent"))
    with pytest.raises(RequestFailed, match="silent"):
        await put_to_sleep(fleet, level=1, mode="abort", timeout=1)
    assert fleet.asked[-1] is CommandName.WAKE_UP


async def test_no_engines_never_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ABORT_SECONDS", 0.0)
    reply = await put_to_sleep(Fleet(0, engines=0), level=1, mode="abort", timeout=1)
    assert not reply.ok
